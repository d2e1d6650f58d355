const text = v => v == null ? "–" : v && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(2) : String(+v.toPrecision(4));
const nearest = (steps, at) => {
  let low = 0, high = steps.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (steps[mid] < at) low = mid + 1; else high = mid; }
  return low && at - steps[low - 1] < steps[low] - at ? low - 1 : low;
};
for (const data of document.querySelectorAll(".data")) {
const { first, last, lines } = JSON.parse(data.textContent);
const charts = [...data.parentElement.querySelectorAll("svg[data-key]")];
const show = at => {
  for (const svg of charts) {
    const hair = svg.querySelector(".hair"), x = (at - first) / Math.max(last - first, 1) * svg.dataset.width;
    hair.setAttribute("x1", x); hair.setAttribute("x2", x); hair.style.visibility = "visible";
    const parts = lines.filter(line => line.key == svg.dataset.key).map(line => {
      const i = nearest(line.steps, at);
      return (line.label + " " + text(line.values[i])).trim() + (line.every ? "" : " at " + line.steps[i]);
    });
    svg.querySelector(".readout").textContent = "step " + Math.round(at) + ": " + parts.join(", ");
  }
};
const hide = () => charts.forEach(svg => {
  svg.querySelector(".hair").style.visibility = "hidden"; svg.querySelector(".readout").textContent = "";
});
for (const svg of charts) {
  svg.addEventListener("pointermove", event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const share = Math.min(1, Math.max(0, point.x / svg.dataset.width));
    const steps = lines[0].steps;
    show(steps[nearest(steps, first + share * (last - first))]);
  });
  svg.addEventListener("pointerleave", hide);
}
}
