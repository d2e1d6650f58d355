"""Memory and seconds of one plan, predicted from a ModelSpec and a Plan, without torch."""
