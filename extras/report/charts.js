// Draws charts.py's specs by Vega (vegaEmbed), and makes their rows of the page's data. A drawing is {rows, series,
// legend, unit}: of the series, and of what the legend lists, the name, the colour and the kind of line; and the unit of
// its axis of time, {name, seconds}.
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

  // Of all charts of metrics: percent of a curve's points in a mean, and whether x is the time, not the step.
  const shared = { smoothing: 10, byTime: false };

  const themed = (isDark) => {
    const ink = isDark ? "#ccc" : "#333", line = isDark ? "#3a3f46" : "#e0e3e8";
    const colours = { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line };
    const axis = { ...colours, labelFontSize: 11, titleFontWeight: "normal" };
    const config = { background: null, view: { stroke: null }, axis }, theme = isDark ? "dark" : "light";
    return { config, tooltip: { theme }, actions: false, renderer: "canvas", logLevel: 1 };
  };
  // The spec with the rows, and with all that depends on the reader: width, light or dark, and what is `shared`.
  const dressed = ({ spec: written, rows, series, unit }, width, isDark, legend = null) => {
    const spec = written.layer && shared.byTime ? byTime(written, unit) : written;
    const { x, color } = spec.encoding, domain = series.map(({ name }) => name);
    const scaled = (range) => ({ ...color, legend, scale: { domain, range } });
    const axis = { ...x.axis, grid: false, tickCount: Math.ceil(width / 90) };
    const encoding = { ...spec.encoding, x: { ...x, axis }, color: scaled(series.map(({ colour }) => colour)) };
    const strokeDash = scaled(series.map(({ line }) => DASHES[line]));
    const looked = ({ mark, ...layer }) => {
      if (mark.type !== "line") return { ...layer, mark };
      const opacity = Math.min(1, (mark.opacity ?? 1) * (isDark ? 2.7 : 1)); // faint blue is lost in the dark
      return { ...layer, mark: { ...mark, opacity }, encoding: { ...layer.encoding, strokeDash } };
    };
    const params = [{ name: "smoothing", value: shared.smoothing }];
    const layers = spec.layer && { layer: spec.layer.map(looked), params };
    const padding = { left: 0, top: 4, right: 8, bottom: 5 };
    return { ...spec, ...layers, encoding, padding, data: { values: rows } };
  };
  const paint = async (place) => {
    const chart = drawn.get(place);
    const { view } = await vegaEmbed(place, dressed(chart, place.clientWidth, dark.matches), themed(dark.matches));
    chart.view?.finalize();
    chart.view = view;
    if (!drawn.has(place)) view.finalize();
  };
  const repaint = () => drawn.forEach(({ view }, place) => view && paint(place));
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
  dark.addEventListener("change", repaint);
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

  // The spec over the time; at a step, runs of one group are at the mean of their times.
  const byTime = (spec, unit) => {
    const atTime = ({ params, transform, ...layer }) => {
      if (!params) return { ...layer, transform };
      const [{ select, ...param }] = params, [number, pivot] = transform;
      const pointed = [{ ...param, select: { ...select, fields: ["time"] } }];
      return { ...layer, transform: [number, { ...pivot, groupby: ["time", "step"] }], params: pointed };
    };
    const { x, ...others } = spec.encoding, { tickMinStep, ...axis } = x.axis;
    const encoding = { ...others, x: { ...x, field: "time", title: `${unit.name} of training`, axis } };
    const calculate = `toNumber(format(datum.seconds / ${unit.seconds}, '.5g'))`; // as one reads it where one points
    const clock = [{ filter: "isValid(datum.seconds)" }, { calculate, as: "time" }];
    return { ...spec, transform: [...clock, ...spec.transform], layer: spec.layer.map(atTime), encoding };
  };

  const look = (colour, line = 0) => {
    const beyond = Math.floor(colour / COLOURS.length);
    return { colour: COLOURS[colour % COLOURS.length], line: LINES[(line + beyond) % LINES.length] };
  };
  const UNITS = [["hours", 3600], ["minutes", 60], ["seconds", 1]].map(([name, seconds]) => ({ name, seconds }));
  // The seconds of training at a step of each run, between those of its record in proportion; null: beyond them. And the
  // largest unit of which the longest run has two.
  const clockOf = (data) => {
    const known = data.metrics["training/seconds"] ?? [], ends = known.map(({ values }) => values.at(-1));
    const clocks = new Map(known.map((curve) => [curve.run, curve]));
    const at = (run, step) => {
      const { steps, values } = clocks.get(run) ?? { steps: [] }, next = steps.findIndex((one) => one >= step);
      if (next < 0 || (next === 0 && steps[0] > step)) return null;
      if (steps[next] === step) return values[next];
      const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
      return values[next - 1] + share * (values[next] - values[next - 1]);
    };
    return { at, unit: UNITS.find(({ seconds }) => Math.max(...ends) >= 2 * seconds) ?? UNITS.at(-1) };
  };

  // The drawing of a chart's metrics, without the runs whose numbers are in `hidden`. A series is a metric, or, where
  // the page has several groups of runs, a group: that has one colour in all charts, and metrics differ in their lines.
  const curves = (data, names, hidden = new Set()) => {
    const groups = [...new Set(data.runs.map(({ group }) => group))], byGroup = groups.length > 1;
    const all = names.flatMap((name) => (data.metrics[name] ?? []).map((curve) => ({ ...curve, name })));
    const shown = all.filter(({ run }) => !hidden.has(run)), series = new Map(), listed = new Map();
    const { at, unit } = clockOf(data);
    const rows = shown.flatMap((curve) => {
      const { name: run, group } = data.runs[curve.run], number = names.indexOf(curve.name);
      const name = [...(byGroup && names.length === 1 ? [] : [curve.name]), ...(byGroup ? [group] : [])].join(" · ");
      series.set(name, { name, ...(byGroup ? look(groups.indexOf(group), number) : look(number)) });
      if (byGroup) listed.set(group, { name: group, ...look(groups.indexOf(group)) });
      const point = (step, place) =>
        ({ step, seconds: at(curve.run, step), value: curve.values[place], series: name, run });
      const points = curve.steps.map(point);
      return points.filter(({ value }) => value !== null);
    });
    if (byGroup && names.length > 1) {
      for (const { name } of shown) listed.set(name, { name, ...look(0, names.indexOf(name)), colour: GREY });
    }
    return { rows, series: [...series.values()], legend: [...(byGroup ? listed : series).values()], unit };
  };

  // A drawing's rows as CSV.
  const csv = ({ rows }) => {
    const quoted = (cell) => (typeof cell === "string" ? `"${cell.replaceAll('"', '""')}"` : cell);
    const columns = ["run", "series", "step", "seconds", "value"];
    return [columns, ...rows.map((row) => columns.map((name) => quoted(row[name])))].join("\n") + "\n";
  };

  // The drawing of the seconds of one run's steps by stage, each in its own colour in every report; and its title.
  const stages = ({ names, steps, seconds, width }, what = "a step", each = "each step") => {
    const rowsOf = (name, place) =>
      steps.map((step, at) => ({ step, value: seconds[place][at], series: name, place, width }));
    const series = names.map((name) => ({ name, colour: colourOf(name) }));
    const title = width > 1 ? `Mean seconds of ${what}: a bar is the mean of ${width} steps` : `Seconds of ${each}`;
    return { rows: names.flatMap(rowsOf), series, title };
  };

  // Smooths all charts of metrics by means of so many percent of a curve's points.
  const smooth = (percent) => {
    shared.smoothing = percent;
    for (const { spec, view } of drawn.values()) if (view && spec.layer) view.signal("smoothing", percent).runAsync();
  };
  // Draws all charts of metrics over the time, or over the step.
  const turnToTime = (isTime) => {
    shared.byTime = isTime;
    repaint();
  };
  // A picture of the chart at `place`, as a PNG for pages of others: light, with its title and legend.
  const png = async (place, title) => {
    const chart = drawn.get(place), width = 640, longest = Math.max(...chart.series.map(({ name }) => name.length));
    const columns = Math.max(1, Math.floor(width / (40 + 6 * longest)));
    const legend = { ...chart.spec.encoding.color.legend, symbolType: "stroke", symbolStrokeWidth: 2, columns };
    const spec = dressed(chart, width, false, legend), { config, ...theme } = themed(false);
    const height = spec.height + 20 + 14 * Math.ceil(chart.series.length / columns);
    const sized = { width, height, padding: 10, title: { text: title, anchor: "start" } };
    const look = { ...theme, config: { ...config, background: "white" } };
    const { view } = await vegaEmbed(document.createElement("div"), { ...spec, ...sized }, look);
    const canvas = await view.toCanvas(2);
    view.finalize();
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  };

  return { draw, logarithmic, curves, csv, png, stages, smooth, turnToTime };
})();
