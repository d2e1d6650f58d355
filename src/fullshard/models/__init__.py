"""The reference transformer. Any other `nn.Module` trains just as well."""
