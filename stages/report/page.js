"use strict";
// Filters of tables and answers. Without it everything is shown.
const one = (query) => document.querySelector(query);
const all = (query) => [...document.querySelectorAll(query)];

function filter() {
  const [policy, workload, kind] = ["#policy", "#workload", "#kind"].map((query) => one(query)?.value ?? "");
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
}

function open(body, yes) {
  body.classList.toggle("closed", !yes);
  body.querySelector(".toggle").setAttribute("aria-expanded", String(yes));
}

one("#unscripted").hidden = true;
all(".filters, .tools").forEach((tools) => (tools.hidden = false));
one(".filters").addEventListener("submit", (event) => event.preventDefault());
["#policy", "#workload", "#kind"].forEach((query) => one(query)?.addEventListener("change", filter));
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
filter();
