/* Draws the charts of a page with uPlot, from tables of numbers: showCharts(page) once, page.update(tables) for new numbers. */
"use strict";

function showCharts(page) {
  const colors = ["#2a7de1", "#e8710a", "#1e9e5a", "#d63c3c", "#8e5bd6", "#a0693f", "#d65da8", "#808080", "#9a9a12", "#17a2b8"];
  const gray = "#7c7c7c", grid = { stroke: "rgba(128,128,128,.22)", width: 1 };
  const controls = document.getElementById("controls");
  const chosen = { x: Object.keys(page.axes)[0], log: false };
  const plots = new Map();  // from the figure to its plot

  const format = v => {
    if (v == null) return "–";
    const size = Math.abs(v);
    return size >= 1e6 || (size > 0 && size < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(5));
  };
  const units = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];
  const tick = v => {
    if (v == null) return "";
    const [, unit] = units.find(([least]) => Math.abs(v) >= least) || [1, ""];
    return +(v / { G: 1e9, M: 1e6, k: 1e3, "": 1 }[unit]).toPrecision(6) + unit;
  };
  const drawable = values => chosen.log ? values.map(v => v > 0 ? v : null) : values;

  function columns(chart) {  // one array of x, then those of the series: y, and the ends of a band
    const tables = chart.series.map(s => {
      const table = page.tables[s.tables[chosen.x]];
      return [table[chosen.x], ...[s.y, ...(s.band || [])].map(name => drawable(table[name]))];
    });
    return uPlot.join(tables);
  }

  function draw(figure) {
    const chart = page.charts[figure.dataset.chart];
    const series = [{ label: page.axes[chosen.x], value: (u, v) => format(v) }], bands = [], parts = [];
    for (const s of chart.series) {
      const color = colors[s.color % colors.length], own = [series.length];
      series.push({
        label: s.label, stroke: color, spanGaps: true, value: (u, v) => format(v),
        width: s.style === "point" ? 0 : s.style === "faint" ? 1 : 1.8, dash: s.style === "faint" ? [4, 3] : undefined,
        points: s.style === "point" ? { show: true, size: 12, fill: color } : { size: 5 },
      });
      if (s.band) {
        for (const end of s.band) {
          own.push(series.length);
          series.push({ label: end, stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, class: "band" });
        }
        bands.push({ series: [own[2], own[1]], fill: color + "2b" });
      }
      parts.push(own);
    }
    const width = figure.clientWidth;
    const together = (u, index) => {  // a band is hidden together with its curve
      const own = parts.find(p => p[0] === index);
      if (own) own.slice(1).forEach(i => u.series[i].show !== u.series[index].show && u.setSeries(i, { show: u.series[index].show }));
    };
    figure.querySelector(".uplot")?.remove();
    plots.set(figure, new uPlot({
      width, height: Math.max(200, Math.min(300, width * 0.55)), series, bands,
      scales: { x: { time: false }, y: { distr: chosen.log ? 3 : 1 } },
      axes: [
        { stroke: gray, grid, ticks: grid, values: (u, all) => all.map(tick) },
        { stroke: gray, grid, ticks: grid, size: 62, values: (u, all) => all.map(tick) },
      ],
      cursor: { sync: { key: "germline" } },
      hooks: { setSeries: [together] },
    }, columns(chart), figure));
  }

  const figures = [...document.querySelectorAll("figure[data-chart]")].filter(figure => page.charts[figure.dataset.chart]);
  const drawAll = () => figures.forEach(draw);
  if (controls) {
    controls.hidden = false;
    const select = controls.elements.x;
    for (const [name, label] of Object.entries(page.axes)) select.add(new Option(label, name));
    controls.addEventListener("change", () => { chosen.x = select.value; chosen.log = controls.elements.log.checked; drawAll(); });
    controls.addEventListener("submit", event => event.preventDefault());
  }
  drawAll();
  new ResizeObserver(() => figures.forEach(figure => {
    const plot = plots.get(figure), width = figure.clientWidth;
    if (width && plot.width !== width) plot.setSize({ width, height: Math.max(200, Math.min(300, width * 0.55)) });
  })).observe(document.body);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => part.open = true));

  page.update = tables => {
    page.tables = tables;
    figures.forEach(figure => {
      const plot = plots.get(figure), x = plot.data[0], { min, max } = plot.scales.x;
      const zoomed = x.length && (min > x[0] || max < x[x.length - 1]);
      plot.setData(columns(page.charts[figure.dataset.chart]), !zoomed);
      if (zoomed) plot.redraw();
    });
  };
  return page;
}
