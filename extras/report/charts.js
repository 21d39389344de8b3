// Draws charts.py's specs by Vega (vegaEmbed), and makes their rows of the page's data. A drawing is {rows, series,
// legend}: of the series, and of what the legend lists, the name, the colour and the kind of line.
const charts = (() => {
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]; // Okabe and Ito's: for all eyes
  const GREY = "#8c9199", LINES = ["solid", "dashed", "dotted"];
  const DASHES = { solid: [1, 0], dashed: [6, 3], dotted: [2, 3] };

  const OF_STAGES = {
    gen: "#0072b2", update_actor: "#e69f00", reward: "#009e73", testing: "#cc79a7", old_log_prob: "#56b4e9",
    update_critic: "#d55e00", ref: "#aa4499", values: "#ddcc77", data: "#44aa99", save_checkpoint: "#b5a642",
    update_weights: "#6699cc", start: "#999933", adv: "#cc6677", gen_max: "#88ccee",
    other: GREY, log: GREY, metrics: GREY, update_sampler: GREY,
  };
  // A stage of a user's trainer has the colour of its letters.
  const colourOf = (stage) =>
    OF_STAGES[stage] ?? COLOURS[[...stage].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % COLOURS.length];

  const dark = matchMedia("(prefers-color-scheme: dark)"), drawn = new Map(); // place → {spec, rows, series, view}

  const themed = () => {
    const ink = dark.matches ? "#ccc" : "#333", line = dark.matches ? "#3a3f46" : "#e0e3e8";
    const colours = { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line };
    const axis = { ...colours, labelFontSize: 11, titleFontWeight: "normal" };
    const config = { background: null, view: { stroke: null }, axis }, theme = dark.matches ? "dark" : "light";
    return { config, tooltip: { theme }, actions: false, renderer: "canvas", logLevel: 1 };
  };
  const paint = async (place) => {
    const chart = drawn.get(place), { spec, rows, series } = chart, { x, color } = spec.encoding;
    const domain = series.map(({ name }) => name);
    const scaled = (range) => ({ ...color, legend: null, scale: { domain, range } });
    const axis = { ...x.axis, grid: false, tickCount: Math.ceil(place.clientWidth / 90) };
    const encoding = { ...spec.encoding, x: { ...x, axis }, color: scaled(series.map(({ colour }) => colour)) };
    const strokeDash = scaled(series.map(({ line }) => DASHES[line]));
    const looked = ({ mark, ...layer }) => {
      if (mark.type !== "line") return { ...layer, mark };
      const opacity = Math.min(1, (mark.opacity ?? 1) * (dark.matches ? 2.7 : 1)); // faint blue is lost in the dark
      return { ...layer, mark: { ...mark, opacity }, encoding: { ...layer.encoding, strokeDash } };
    };
    const layers = spec.layer && { layer: spec.layer.map(looked) };
    const padding = { left: 0, top: 4, right: 8, bottom: 5 };
    const view = await vegaEmbed(place, { ...spec, ...layers, encoding, padding, data: { values: rows } }, themed());
    chart.view?.finalize();
    chart.view = view;
    if (!drawn.has(place)) view.finalize();
  };
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        seen.unobserve(target);
        paint(target);
      }
    },
    { rootMargin: "200px" },
  );
  dark.addEventListener("change", () => drawn.forEach(({ view }, place) => view && paint(place)));
  const forget = () => {
    for (const [place, { view }] of drawn) {
      if (place.isConnected) continue;
      seen.unobserve(place);
      view?.finalize();
      drawn.delete(place);
    }
  };
  new MutationObserver(forget).observe(document.body, { childList: true, subtree: true });

  // Draws into `place` when that is first seen, and anew when light turns to dark, until it is taken from the page.
  const draw = (place, spec, drawing) => {
    place.style.minHeight = `${spec.height}px`;
    drawn.set(place, { spec, ...drawing, view: drawn.get(place)?.view });
    seen.observe(place);
  };

  // The spec with a logarithmic axis: of values above zero, without the band, whose lower end may be below it.
  const logarithmic = (spec) => {
    const scaled = ({ encoding: { y, ...others }, ...layer }) =>
      ({ ...layer, encoding: y ? { ...others, y: { ...y, scale: { type: "log" } } } : others });
    const layer = spec.layer.filter(({ mark }) => mark.type !== "area").map(scaled);
    return { ...spec, transform: [{ filter: "datum.value > 0" }, ...spec.transform], layer };
  };

  const look = (colour, line = 0) => {
    const beyond = Math.floor(colour / COLOURS.length);
    return { colour: COLOURS[colour % COLOURS.length], line: LINES[(line + beyond) % LINES.length] };
  };
  // The drawing of a chart's metrics, without the runs whose numbers are in `hidden`. A series is a metric, or, where
  // the page has several groups of runs, a group: that has one colour in all charts, and metrics differ in their lines.
  const curves = (data, names, hidden = new Set()) => {
    const groups = [...new Set(data.runs.map(({ group }) => group))], byGroup = groups.length > 1;
    const all = names.flatMap((name) => (data.metrics[name] ?? []).map((curve) => ({ ...curve, name })));
    const shown = all.filter(({ run }) => !hidden.has(run)), series = new Map(), listed = new Map();
    const rows = shown.flatMap((curve) => {
      const { name: run, group } = data.runs[curve.run], number = names.indexOf(curve.name);
      const name = [...(byGroup && names.length === 1 ? [] : [curve.name]), ...(byGroup ? [group] : [])].join(" · ");
      series.set(name, { name, ...(byGroup ? look(groups.indexOf(group), number) : look(number)) });
      if (byGroup) listed.set(group, { name: group, ...look(groups.indexOf(group)) });
      const points = curve.steps.map((step, place) => ({ step, value: curve.values[place], series: name, run }));
      return points.filter(({ value }) => value !== null);
    });
    if (byGroup && names.length > 1) {
      for (const { name } of shown) listed.set(name, { name, ...look(0, names.indexOf(name)), colour: GREY });
    }
    return { rows, series: [...series.values()], legend: [...(byGroup ? listed : series).values()] };
  };

  // A drawing's rows as CSV.
  const csv = ({ rows }) => {
    const quoted = (cell) => (typeof cell === "string" ? `"${cell.replaceAll('"', '""')}"` : cell);
    const columns = ["run", "series", "step", "value"];
    return [columns, ...rows.map((row) => columns.map((name) => quoted(row[name])))].join("\n") + "\n";
  };

  // The drawing of the seconds of one run's steps by stage, each in its own colour in every report; and its title.
  const stages = ({ names, steps, seconds, width }) => {
    const rowsOf = (name, place) =>
      steps.map((step, at) => ({ step, value: seconds[place][at], series: name, place, width }));
    const series = names.map((name) => ({ name, colour: colourOf(name) }));
    const title = width > 1 ? `Mean seconds of a step: a bar is the mean of ${width} steps` : "Seconds of each step";
    return { rows: names.flatMap(rowsOf), series, title };
  };

  return { draw, logarithmic, curves, csv, stages };
})();
