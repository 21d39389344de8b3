// The page: its elements, its tabs, and where one is in it. All text of runs goes through `visible` and textContent.
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);

  // Elements

  // Control characters, marks that turn or hide text, and halves of characters; they are shown as symbols.
  const HIDDEN = new RegExp(
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
      "\\ufeff\\ufff9-\\ufffb]|\\p{Cs}",
    "gu",
  );
  const symbol = (mark) => {
    const code = mark.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  };
  const visible = (text) => String(text).replace(HIDDEN, symbol);

  // Makes an element. Its children are elements, or text, which is made visible, or lists of them; null is left out.
  const make = (tag, traits = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(traits)) {
      if (name in node) node[name] = value;
      else node.setAttribute(name, value);
    }
    const there = children.flat(2).filter((child) => child != null);
    node.append(...there.map((child) => (child instanceof Node ? child : visible(child))));
    return node;
  };
  const box = (className, ...children) => make("div", { className }, ...children);
  const card = (...children) => make("article", { className: "card" }, ...children);
  const soft = (...children) => make("p", { className: "soft" }, ...children);

  const figure = (value) => {
    if (value == null || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) || size >= 1e5) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(size < 1 ? 3 : 4)));
  };
  const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
  const spell = (value) => {
    if (typeof value === "string") return value;
    const line = JSON.stringify(value);
    return line.length < 100 ? line : JSON.stringify(value, null, 1);
  };
  const fields = (pairs) => {
    const entry = ([name, value]) => [make("dt", {}, name), make("dd", {}, spell(value))];
    return make("dl", {}, pairs.map(entry));
  };
  const table = (heads, rows) => {
    const row = (cells, tag) => make("tr", {}, cells.map((cell) => make(tag, {}, cell)));
    const body = rows.map((cells) => row(cells, "td"));
    return box("scroll", make("table", {}, make("thead", {}, row(heads, "th")), make("tbody", {}, body)));
  };

  const figures = (pairs) => {
    const entry = ([name, value]) => make("div", {}, make("b", {}, value), make("span", { className: "soft" }, name));
    return box("figures", pairs.map(entry));
  };

  // Charts

  const chartBox = (title, spec, drawing) => {
    const entry = ({ name, colour, line }) =>
      make("span", {}, make("i", { className: "line", style: `border-top:3px ${line} ${colour}` }), name);
    const place = box("plot"), legend = drawing.legend && box("legend", drawing.legend.map(entry));
    charts.draw(place, spec, drawing);
    const save = (blob, ending) => {
      const href = URL.createObjectURL(blob);
      make("a", { href, download: `${title.replace(/[^\w.-]+/g, "_")}.${ending}` }).click();
      setTimeout(() => URL.revokeObjectURL(href), 1000);
    };
    const turn = ({ target }) => {
      const isLog = target.ariaPressed !== "true";
      target.ariaPressed = String(isLog);
      charts.draw(place, isLog ? charts.logarithmic(spec) : spec, drawing);
    };
    const log = make("button", { onclick: turn, ariaPressed: "false", title: "values above zero" }, "log y");
    const saveRows = () => save(new Blob([charts.csv(drawing)], { type: "text/csv" }), "csv");
    const savePicture = async () => save(await charts.png(place, title), "png");
    const csv = make("button", { onclick: saveRows, title: "its points, as a file" }, "CSV");
    const png = make("button", { onclick: savePicture, title: "its picture, as a file" }, "PNG");
    return box("chart card", box("bar", make("h3", {}, title), legend && box("end", log, csv, png)), legend, place);
  };
  const specOf = (id) => data.charts.find((chart) => chart.id === id).spec;
  const fixedCharts = (hidden) =>
    data.charts
      .filter(({ names }) => names.length)
      .map(({ title, spec, names }) => chartBox(title, spec, charts.curves(data, names, hidden)));

  // Tabs

  const summary = () => {
    const state = (run) => make("span", { className: `state ${run.state}` }, run.state);
    const finding = ({ level, text, remedy }) =>
      box(`finding ${level}`, make("span", { className: "level" }, level), make("b", {}, text), make("p", {}, remedy));
    const several = data.runs.length > 1;
    const article = (run) =>
      card(
        make("h2", {}, run.name, " ", state(run)),
        several ? null : figures(Object.entries(run.headline)),
        run.findings.length ? run.findings.map(finding) : box("finding fine", "Nothing looks wrong."),
        run.sentences.map((sentence) => make("p", {}, sentence)),
        run.missing.length ? make("ul", { className: "soft" }, run.missing.map((gap) => make("li", {}, gap))) : null,
      );
    const labels = [...new Set(data.runs.flatMap((run) => Object.keys(run.headline)))];
    const wrong = ({ findings }) => {
      const times = (level) => findings.filter((one) => one.level === level).length;
      return ["warning", "note"].filter(times).map((level) => count(times(level), level)).join(", ") || "nothing";
    };
    const ends = (headline) => labels.map((label) => headline[label] ?? "–");
    const line = (run, number) => {
      const settings = data.varied.map(({ values }) => values[number] ?? "–");
      return [[run.name, " ", state(run)], ...ends(run.headline), wrong(run), ...settings];
    };
    const shared = (group) => ({ values }) => {
      const found = new Set(values.filter((_, number) => data.runs[number].group === group));
      return found.size === 1 ? [...found][0] : "";
    };
    const mean = ({ group, headline }) =>
      [make("b", {}, `${group}: mean ± std`), ...ends(headline), "", ...data.varied.map(shared(group))];
    const told = data.runs.map(article), shown = fixedCharts().slice(0, 2);
    if (!several) return box("columns", box("stack", told), box("stack", shown));
    const settings = data.varied.map(({ key }) => key.split(".").slice(-2).join("."));
    const heads = ["Run", ...labels, "Looks wrong", ...settings];
    const compared = card(table(heads, [...data.runs.map(line), ...data.means.map(mean)]));
    return box("stack", compared, box("columns", shown), box("columns", told));
  };

  // Two controls of all charts, those of the summary too: how much is smoothed, and what is on the x axis.
  const smoothing = () => {
    const told = make("output", {}, "10 %");
    const turn = ({ target }) => {
      charts.smooth(Number(target.value));
      told.textContent = `${target.value} %`;
    };
    const traits = { type: "range", min: 0, max: 30, step: 5, value: 10, oninput: turn };
    const title = "a curve is the mean over so many of its steps, around each; its points are faint";
    return make("label", { className: "range", title }, "smoothing", make("input", traits), told);
  };
  const axis = () => {
    const options = ["step", "time"].map((name) => make("option", {}, name));
    const turn = ({ target }) => charts.turnToTime(target.value === "time");
    return make("label", { className: "range" }, "x axis", make("select", { onchange: turn }, options));
  };

  const curves = () => {
    const fixed = box("grid"), own = box("grid"), names = box("chips"), hidden = new Set(), chosen = new Set();
    const along = axis();
    const redraw = () => {
      along.control.disabled = !data.metrics["training/seconds"];
      fixed.replaceChildren(...fixedCharts(hidden));
      redrawOwn();
    };
    const redrawOwn = () => {
      const chart = (name) => chartBox(name, specOf("metric"), charts.curves(data, [name], hidden));
      own.replaceChildren(...[...chosen].reverse().map(chart));
      list();
    };
    const toggle = (set, value, then) => () => {
      if (!set.delete(value)) set.add(value);
      then();
    };
    const list = () => {
      const metrics = Object.keys(data.metrics).sort(), words = search.value.toLowerCase().split(/\s+/);
      const fits = (name) => search.value && words.every((word) => name.toLowerCase().includes(word));
      const button = (name) =>
        make("button", { onclick: toggle(chosen, name, redrawOwn), ariaPressed: String(chosen.has(name)) }, name);
      const found = metrics.filter((name) => chosen.has(name) || fits(name));
      names.replaceChildren(...found.slice(0, 80).map(button));
      if (!found.length && search.value) names.append(make("span", { className: "soft" }, "No metric is called so."));
      search.placeholder = `Search ${count(metrics.length, "metric")}: kl, length, timing …`;
      chips.replaceChildren(...(data.runs.length > 1 ? data.runs.map(chip) : []));
    };
    const search = make("input", { type: "search", ariaLabel: "Search metrics", oninput: () => list() });
    const chips = box("chips");
    const chip = (run, number) =>
      make("button", { ariaPressed: String(!hidden.has(number)), onclick: toggle(hidden, number, redraw) }, run.name);
    const section = box("stack", box("bar", search, smoothing(), along, chips), names, own, fixed);
    section.renew = redraw;
    redraw();
    return section;
  };

  const time = () => {
    const total = (list) => list.reduce((sum, value) => sum + (value || 0), 0);
    const totals = ({ names, seconds }) => new Map(names.map((name, place) => [name, total(seconds[place])]));
    const spent = data.runs.map((run) => totals(run.stages));
    const article = (run, number) => {
      const all = total([...spent[number].values()]), title = make("h2", {}, run.name);
      if (!all) return card(title, soft("Its record has no training/seconds."));
      const drawing = charts.stages(run.stages);
      const line = ([name, seconds]) => {
        const percent = (100 * seconds) / all, { colour } = drawing.series.find((one) => one.name === name);
        const bar = make("i", { style: `width:${0.6 * percent}%;background:${colour}` });
        return [name, figure(seconds), box("share", bar, make("span", {}, `${percent.toFixed(1)} %`))];
      };
      const lines = [...spent[number]].filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]).map(line);
      const sums = table(["stage", "seconds", "share"], [...lines, ["all", figure(all), ""]]);
      const drawings = [drawing];
      if (run.beside.names.length)
        drawings.push(charts.stages(run.beside, "generation and rewards, beside training", "each step's generation and rewards, beside training"));
      const boxes = drawings.map((one) => chartBox(one.title, specOf("stages"), one));
      return card(title, box("columns", box("stack", ...boxes), sums));
    };
    return box("stack", data.runs.map(article));
  };

  const details = () => {
    const changes = data.differences.map(({ key, values }) => [key, ...values.map((value) => value ?? "–")]);
    const article = (run) => {
      const short = (time) => time.slice(0, 19).replace("T", " "); // without the zone
      const events = run.events.map(({ time, step, level, text }) => [short(time), step ?? "", level, text]);
      return card(
        make("h2", {}, run.name),
        soft(run.folder),
        fields(Object.entries(run.facts)),
        make("h3", {}, "Notices and warnings"),
        events.length ? box("events", table(["time", "step", "level", "text"], events)) : soft("There are none."),
        run.config ? make("details", {}, make("summary", {}, "config.yaml"), make("pre", {}, run.config)) : null,
      );
    };
    const heads = ["setting", ...data.runs.map((run) => run.name)];
    const title = make("h2", {}, "Settings and versions that differ");
    return box("stack", changes.length ? card(title, table(heads, changes)) : null, data.runs.map(article));
  };

  const tools = { make, box, fields, figure, figures, count, visible };
  const samples = () => (data.samples ? samplesTab(tools, data) : card("There are no samples."));

  // Where one is: #summary, #curves, #samples, #sample=RUN.KIND.STEP.LINE, #time, #details

  const TABS = {
    summary: ["Summary", summary],
    curves: ["Curves", curves],
    samples: ["Samples", samples],
    time: ["Time", time],
    details: ["Details", details],
  };
  const main = document.getElementById("main"), nav = document.getElementById("tabs"), made = {};
  const go = () => {
    const [word, key] = location.hash.slice(1).split("=");
    const name = word === "sample" ? "samples" : Object.hasOwn(TABS, word) ? word : "summary";
    if (!made[name]) main.append((made[name] = TABS[name][1]()));
    for (const [other, section] of Object.entries(made)) section.hidden = other !== name;
    for (const tab of nav.children) tab.ariaCurrent = tab.hash === `#${name}` ? "page" : null;
    made[name].open?.(key);
  };
  document.getElementById("title").textContent = visible(data.title);
  nav.append(...Object.entries(TABS).map(([name, [label]]) => make("a", { href: `#${name}` }, label)));
  addEventListener("hashchange", go);
  go();

  // A served page asks for new steps, and keeps its place

  const renew = (fresh) => {
    data = fresh;
    const top = scrollY;
    for (const [name, section] of Object.entries(made)) {
      if (section.renew) {
        section.renew(fresh);
        continue;
      }
      const next = TABS[name][1](), were = section.querySelectorAll("details");
      next.querySelectorAll("details").forEach((part, place) => (part.open = were[place]?.open ?? false));
      next.hidden = section.hidden;
      section.replaceWith((made[name] = next));
      if (!next.hidden) next.open?.();
    }
    scrollTo(0, top);
  };
  const live = make("span", { className: "state running", role: "status" }, "live");
  const ask = async () => {
    try {
      const answer = await fetch(`/data?have=${data.version}`);
      if (answer.status === 200) renew(await answer.json());
      live.textContent = answer.ok ? "live" : "stale: the server cannot read the runs";
    } catch {
      live.textContent = "stale: the server has ended";
    }
    setTimeout(ask, 3000);
  };
  if (data.version) {
    document.querySelector("header").append(live);
    setTimeout(ask, 3000);
  }
})();
