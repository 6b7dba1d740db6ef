"use strict";
// Filters, and the charts' specifications handed to vega-embed. Without it the page is all tables.
const one = (query) => document.querySelector(query);
const all = (query) => [...document.querySelectorAll(query)];
const SPECS = JSON.parse(one("#charts").textContent);
const views = new Map();
const ERRORS = 1; // Vega warns about a layer that shows nothing while all policies are chosen.

// Colours are the page's variables: a chart follows the theme, and paper, without being drawn again.
function looks() {
  const [ink, faint, line] = ["var(--ink)", "var(--faint)", "var(--line)"];
  const longest = Math.max(...all("#policy option").map(({ text }) => text.length));
  const font = getComputedStyle(document.documentElement).fontFamily;
  const text = { labelColor: faint, titleColor: faint, labelFont: font, titleFont: font, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500 };
  return {
    background: "transparent",
    font,
    view: { stroke: null },
    title: { color: faint, font, fontSize: 12, fontWeight: 500 },
    axis: { ...text, titlePadding: 8, gridColor: line, domainColor: line, tickColor: line, labelOverlap: "parity", labelSeparation: 8, labelFlush: false },
    legend: { ...text, orient: "top", columns: longest > 20 || innerWidth < 600 ? 2 : 5, labelLimit: innerWidth < 600 ? 130 : 240 },
    header: { labelColor: ink, labelFont: font, labelFontSize: 13, labelFontWeight: 600, labelAnchor: "start" },
    text: { color: ink, fill: ink, fontSize: 12 },
    rule: { color: ink },
    tick: { color: ink },
    mark: { color: "#3a86d4" },
    point: { color: "#3a86d4" },
  };
}

// A facet has no width of its own: as many panels in a row as the page has room for.
function fitted(spec, width) {
  if (!spec.facet) return spec;
  const columns = Math.max(1, Math.min(spec.columns, Math.floor(width / 330)));
  const panel = Math.max(130, Math.min(Math.floor((width - 80) / columns) - 22, 420));
  return { ...spec, columns, facet: { ...spec.facet, header: { labelLimit: panel } }, spec: { ...spec.spec, width: panel } };
}

const parameters = () => ({ policy: one("#policy").value, workload: one("#workload").value, measure: one("#measure")?.value ?? "" });

async function draw(figure) {
  const place = figure.querySelector(".chart");
  const name = figure.dataset.chart;
  views.get(name)?.finalize();
  views.delete(name);
  if (!SPECS[name]) return;
  // The interpreter of expressions needs no eval, which the page's policy forbids.
  const options = { ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: { disableDefaultStyle: true }, logLevel: ERRORS, config: looks() };
  const chart = await vegaEmbed(place, fitted(SPECS[name], place.clientWidth), options);
  views.set(name, chart);
  await listen(chart.view);
}

async function listen(view) {
  for (const [name, value] of Object.entries(parameters())) view.signal(name, value);
  await view.runAsync();
}

const drawAll = () => Promise.all(all("[data-chart]").map(draw));

function filter() {
  const { policy, workload } = parameters();
  const kind = one("#kind")?.value ?? "";
  const baseline = "fp16 baseline";
  for (const item of all("main [data-policy], main [data-workload]")) {
    const { policy: itsPolicy, workload: itsWorkload } = item.dataset;
    const other = policy && itsPolicy !== undefined && itsPolicy !== policy && !itsPolicy.startsWith(baseline);
    const elsewhere = workload && itsWorkload && itsWorkload !== workload;
    item.hidden = Boolean(other || elsewhere || (kind && item.dataset.kind && item.dataset.kind !== kind));
  }
  const cards = all(".cards article");
  for (const card of cards) card.hidden ||= !card.querySelector(".flip:not([hidden])");
  const fitting = cards.filter((card) => !card.hidden);
  const flips = all(".cards article:not([hidden]) .flip:not([hidden])").length;
  if (cards.length) one("#count").textContent = `${flips} of ${all(".cards .flip").length} answers, of ${fitting.length} samples`;
  views.forEach(({ view }) => listen(view));
}

function open(body, yes) {
  body.classList.toggle("closed", !yes);
  body.querySelector(".toggle").setAttribute("aria-expanded", String(yes));
}

one("#unscripted").hidden = true;
all(".filters, .tools").forEach((tools) => (tools.hidden = false));
one(".filters").addEventListener("submit", (event) => event.preventDefault());
["#policy", "#workload", "#kind", "#measure"].forEach((query) => one(query)?.addEventListener("change", filter));
all("tbody.many").forEach((body) => {
  open(body, false);
  body.querySelector(".toggle").addEventListener("click", () => open(body, body.classList.contains("closed")));
});
one("#expand")?.addEventListener("click", ({ currentTarget: button }) => {
  const yes = button.getAttribute("aria-expanded") === "false";
  button.setAttribute("aria-expanded", String(yes));
  button.textContent = yes ? "Show the worst of each check" : "Show every workload";
  all("tbody.many").forEach((body) => open(body, yes));
});
let width = innerWidth;
addEventListener("resize", () => {
  if (Math.abs(innerWidth - width) < 40) return;
  width = innerWidth;
  drawAll();
});

drawAll().then(() => {
  filter();
  document.documentElement.dataset.ready = "";
});
