// The tab of samples: a list, and the sample that is looked at. Columns of all samples are there at once; a chunk of
// tokens is opened when it is first looked at. samples.py says how they are packed.
const samplesTab = ({ make, box, fields, figure, count, visible }, data) => {
  const ROW = 46; // pixels
  const ORDERS = { step: "step", score: "score", advantage: "adv.", length: "tokens", end: "end" };
  const NAMES = { log_prob: "log-prob", kl: "KL" }; // of numbers; others are called as they are
  const MEANINGS = {
    log_prob: "of the rollout",
    mismatch: "the policy's log-prob less the rollout's",
    kl: "the policy's log-prob less the reference's",
    value: "the critic's",
  };
  const SHADES = { log_prob: "--minus", entropy: "--calm" }; // others: blue above zero, orange below it
  const SHOWN_TOKENS = 3000, FEW_SAMPLES = 4, SNIPPET = 60;
  const NONE = -(2 ** 15); // of numbers in two bytes, which are thousandths; those in four are floats

  const nameOf = (number) => NAMES[number] ?? number;
  const once = (compute) => {
    let made = null;
    return () => (made ??= compute());
  };
  const inflate = (packed) => {
    const text = atob(packed), bytes = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  };
  const inflateJson = async (packed) => JSON.parse(new TextDecoder().decode(await inflate(packed)));

  // Opens a chunk: {ids, mask, numbers: {name: {top, at(token)}}, details}, ids and mask by token, details by sample.
  const openChunk = async (chunk) => {
    const [buffer, details] = await Promise.all([inflate(chunk.data), inflateJson(chunk.details)]), numbers = {};
    let start = 4 * chunk.tokens;
    for (const { name, bytes, top } of chunk.numbers) {
      const short = bytes === 2, values = new (short ? Int16Array : Float32Array)(buffer, start, chunk.tokens);
      const isNone = short ? (value) => value === NONE : Number.isNaN, scale = short ? 1000 : 1;
      const at = (token) => (isNone(values[token]) ? null : values[token] / scale);
      numbers[name] = { top: top || 1, at };
      start += bytes * chunk.tokens;
    }
    return { ids: new Uint32Array(buffer, 0, chunk.tokens), mask: new Uint8Array(buffer, start), numbers, details };
  };

  // Unpacks the page's samples. A sample is a number, counted from 0; its key stays when others are added.
  const unpack = ({ columns, chunks, reasons, prompts, vocabulary, left_out }) => {
    const total = columns.score.length, chunkOf = [], offset = new Uint32Array(total);
    for (const chunk of chunks) {
      Object.assign(chunk, { first: chunkOf.length, open: once(() => openChunk(chunk)) });
      let at = 0;
      for (let sample = chunk.first; sample < chunk.first + chunk.count; at += columns.tokens[sample++]) {
        offset[sample] = at;
        chunkOf.push(chunk);
      }
    }
    for (const name of ["run", "kind", "step"]) columns[name] = chunkOf.map((chunk) => chunk[name]);
    columns.end = columns.reason.map((number) => reasons[number]);
    const key = (sample) => ["run", "kind", "step", "line"].map((name) => columns[name][sample]).join(".");
    const byKey = once(() => new Map(chunkOf.map((_, sample) => [key(sample), sample])));
    const tables = once(() => Promise.all([inflateJson(vocabulary), inflateJson(prompts)]));
    const open = async (sample) => {
      const chunk = chunkOf[sample], [opened, [words, prompts]] = await Promise.all([chunk.open(), tables()]);
      const start = offset[sample], end = start + columns.tokens[sample];
      return { ...opened, words, prompts, start, end, detail: opened.details[sample - chunk.first] };
    };
    // The first tokens of what the policy said, with a dot where the environment spoke.
    const text = async (sample, most) => {
      const { ids, mask, words, start, detail } = await open(sample);
      let said = detail.output ?? "", token = start, count = 0;
      for (const [, length] of detail.rows) {
        let apart = said && " · ";
        for (const end = token + length; token < end && count < most; token++) {
          if (mask[token]) [said, apart, count] = [said + apart + words.texts[ids[token]], "", count + 1];
          else apart = said && " · ";
        }
      }
      return said;
    };
    return { total, columns, chunks, tables, open, text, key, find: (wanted) => byKey().get(wanted), left_out };
  };
  let samples = unpack(data.samples);

  // Calls `hit` with each sample that has the text in a prompt, its tokens or other fields, and now and then `tell`,
  // which says whether to go on.
  const searchAll = async (query, hit, tell) => {
    const wanted = query.toLowerCase(), has = (text) => text.toLowerCase().includes(wanted);
    const { columns, chunks, tables } = samples, [words, prompts] = await tables();
    const asked = prompts.map(has), texts = words.texts.map((text) => text.toLowerCase());
    let since = performance.now();
    for (const chunk of chunks) {
      const { ids, details } = await chunk.open();
      let token = 0;
      details.forEach(({ rows, said, about, output }, place) => {
        const sample = chunk.first + place, end = token + columns.tokens[sample];
        let text = output?.toLowerCase() ?? "";
        for (; token < end; token++) text += texts[ids[token]];
        const inPrompt = asked[columns.prompt[sample]] || rows.some(([prompt]) => asked[prompt]);
        const inFields = () => [said, about].some((part) => Object.values(part).some((value) => has(plain(value))));
        if (inPrompt || text.includes(wanted) || inFields()) hit(sample);
      });
      if (performance.now() - since > 150) {
        if (!tell()) return;
        await new Promise((resolve) => setTimeout(resolve));
        since = performance.now();
      }
    }
  };
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

  // The colours of tokens

  let chosen = "advantage"; // what tokens are coloured by, where it was computed
  const blend = (shade, percent) => `color-mix(in srgb, var(${shade}) ${percent}%, transparent)`;
  const shadeOf = (name, value, top) => {
    const strength = value === 0 ? 0 : Math.round(12 + 56 * Math.min(1, Math.abs(value) / top));
    return blend(SHADES[name] ?? (value > 0 ? "--plus" : "--minus"), strength);
  };
  const MASKS = ["var(--card)", blend("--plus", 25), blend("--minus", 40)]; // the environment's, trained, left out
  const legendOf = (name, numbers) => {
    const swatch = (background) => make("i", { style: `background:${background}` });
    const masks = ["the environment's", "trained", "the policy's, not in the loss"];
    if (name === "mask") return [1, 2, 0].flatMap((mask) => [swatch(MASKS[mask]), masks[mask]]);
    const { top } = numbers[name], low = name === "entropy" ? 0 : -top, high = name === "log_prob" ? 0 : top;
    const shades = [0, 0.25, 0.5, 0.75, 1].map((part) => shadeOf(name, low + part * (high - low), top));
    const ramp = make("i", { className: "ramp", style: `background:linear-gradient(90deg,${shades})` });
    return [figure(low), ramp, make("span", {}, figure(high)), MEANINGS[name] ?? ""];
  };

  const tip = make("div", { id: "tip", role: "status", hidden: true });
  const hideTip = () => (tip.hidden = true);
  const showTip = (span, lines) => {
    tip.replaceChildren(fields(lines));
    tip.hidden = false;
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect(), below = at.bottom + 6;
    tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? Math.max(4, at.top - tip.offsetHeight - 6) : below}px`;
  };

  // The sample that is looked at

  // Shows the response of an opened sample: what the policy said and, set apart, what the environment said, token by
  // token, with rewards at their places.
  const viewResponse = ({ ids, mask, numbers, words, prompts, start, end, detail }) => {
    const spans = [], modes = [...Object.keys(numbers), "mask"], text = (token) => words.texts[ids[token]];
    let colour = modes.includes(chosen) ? chosen : modes[0];
    const number = (name, token) => numbers[name]?.at(token) ?? null;
    const paint = (span) => {
      const token = Number(span.dataset.token), value = number(colour, token);
      if (!mask[token]) span.style.background = "";
      else if (colour === "mask") span.style.background = MASKS[mask[token]];
      else span.style.background = value === null ? "" : shadeOf(colour, value, numbers[colour].top);
    };
    const spanOf = (token) => {
      const kind = text(token) === "" ? "token part" : text(token).trim() ? "token" : "token blank";
      const span = make("span", { className: kind, tabIndex: spans.length ? -1 : 0 }, text(token));
      span.dataset.token = token;
      span.dataset.mark = text(token) === "" ? "·" : "↵".repeat(text(token).split("\n").length - 1);
      paint(span);
      spans.push(span);
      return span;
    };
    const rewardAt = (token) => {
      const reward = number("reward", token);
      const shown = `${reward > 0 ? "+" : ""}${figure(reward)}`;
      return reward ? [make("span", { className: "reward", title: "reward" }, shown)] : [];
    };
    // Adds tokens to `into`, SHOWN_TOKENS at once, in parts by whose they are.
    const fill = (from, to, into) => {
      const now = Math.min(to, from + SHOWN_TOKENS);
      for (let token = from; token < now; ) {
        const policy = mask[token] > 0, part = box(policy ? "said" : "environment");
        for (; token < now && mask[token] > 0 === policy; token++) part.append(spanOf(token), ...rewardAt(token));
        into.append(part);
      }
      const more = (event) => {
        event.target.remove();
        fill(now, to, into);
      };
      if (now < to) into.append(make("button", { onclick: more }, `Show more of ${count(to - now, "token")}`));
    };
    const all = box("tokens");
    let from = start;
    detail.rows.forEach(([prompt, length], place) => {
      if (place) all.append(box("environment prompt", prompts[prompt]));
      const row = box("row");
      fill(from, (from += length), row);
      all.append(row);
    });

    const describe = ({ target }) => {
      const span = target.closest(".token");
      if (!span) return hideTip();
      const token = Number(span.dataset.token), names = mask[token] ? Object.keys(numbers) : ["reward"];
      const known = names.filter((name) => number(name, token) !== null);
      const logProb = mask[token] ? number("log_prob", token) : null;
      showTip(span, [
        ["token", JSON.stringify(text(token))],
        ["id", String(words.ids[ids[token]])],
        ["place", `${token - start + 1} of ${end - start}`],
        ...(mask[token] === 1 ? [] : [["trained", mask[token] ? "no: left out of the loss" : "no: the environment's"]]),
        ...known.map((name) => [nameOf(name), figure(number(name, token))]),
        ...(logProb === null ? [] : [["probability", `${figure(100 * Math.exp(logProb))} %`]]),
      ]);
    };
    all.addEventListener("pointerover", describe);
    all.addEventListener("focusin", describe);
    all.addEventListener("pointerleave", hideTip);
    all.addEventListener("focusout", hideTip);
    all.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      spans[spans.indexOf(event.target) + step]?.focus();
    });

    const options = modes.map((name) => make("option", { value: name }, nameOf(name)));
    const select = make("select", { id: "colour", ariaLabel: "Colour of tokens" }, options), legend = box("legend");
    const recolour = () => {
      colour = select.value;
      spans.forEach(paint);
      legend.replaceChildren(...legendOf(colour, numbers));
    };
    select.value = colour;
    select.onchange = () => {
      chosen = select.value;
      recolour();
    };
    recolour();
    return [box("bar", make("h3", {}, "Response"), make("label", {}, "coloured by ", select), legend), all];
  };

  const linkTo = (sample) => `#sample=${samples.key(sample)}`;
  const select = (fits) => {
    const found = [];
    for (let sample = 0; sample < samples.total; sample++) if (fits(sample)) found.push(sample);
    return found;
  };
  const snippetOf = (sample) => {
    const snippet = make("span", { className: "snippet" });
    samples.text(sample, SNIPPET).then((text) => (snippet.textContent = visible(text.slice(0, 300))));
    return snippet;
  };

  const viewGroup = (sample) => {
    const { columns } = samples, members = select((other) => columns.group[other] === columns.group[sample]);
    if (members.length < 2) return [];
    const top = Math.max(...members.map((other) => Math.abs(columns.advantage[other] ?? 0))) || 1;
    const bar = (value) => {
      const side = value < 0 ? "right:50%;background:var(--minus)" : "left:50%;background:var(--plus)";
      return box("balance", make("i", { style: `width:${(50 * Math.abs(value ?? 0)) / top}%;${side}` }));
    };
    const row = (other) =>
      make(
        "a",
        { href: linkTo(other), className: other === sample ? "member here" : "member" },
        make("b", {}, figure(columns.score[other])),
        make("span", {}, figure(columns.advantage[other])),
        bar(columns.advantage[other]),
        make("span", { className: "soft" }, columns.end[other]),
        snippetOf(other),
      );
    const heads = ["score", "advantage", "", "end", ""].map((head) => make("span", { className: "soft" }, head));
    const title = make("h3", {}, `Its group: ${count(members.length, "sample")} of one prompt`);
    return [title, box("group", box("member", heads), members.map(row))];
  };

  // Shows what became of the same prompt at other steps, a column for each, and for each run.
  const viewSteps = (sample) => {
    const { columns } = samples, same = (name, other) => columns[name][other] === columns[name][sample];
    const alike = select((other) => same("item", other) && same("kind", other));
    alike.sort((a, b) => columns.step[a] - columns.step[b] || columns.run[a] - columns.run[b] || a - b);
    const steps = new Map();
    for (const other of alike) {
      const run = data.runs.length > 1 ? `, ${data.runs[columns.run[other]].name}` : "";
      const title = `step ${columns.step[other]}${run}`;
      if (!steps.has(title)) steps.set(title, box("step", make("b", {}, title)));
      const column = steps.get(title);
      if (column.children.length > FEW_SAMPLES && other !== sample) continue;
      const card = make("a", { href: linkTo(other), className: other === sample ? "text here" : "text" });
      const score = make("b", {}, `score ${figure(columns.score[other])}`);
      samples.text(other, 1000).then((text) => card.replaceChildren(score, "\n", visible(text)));
      column.append(card);
    }
    if (steps.size < 2) return [];
    const place = box("steps", [...steps.values()]);
    requestAnimationFrame(() => (place.scrollLeft = place.querySelector(".here").offsetLeft - place.offsetLeft - 100));
    return [make("h3", {}, "The same prompt over the steps"), place];
  };

  const viewSample = async (sample, move) => {
    const { columns } = samples, opened = await samples.open(sample), { said, about, output } = opened.detail;
    const { gts, ...others } = about, truth = gts == null ? [] : [["ground truth", gts]];
    const link = make("a", { className: "button", href: linkTo(sample) }, "link");
    const run = data.runs.length > 1 ? `${data.runs[columns.run[sample]].name}, ` : "";
    const button = (label, step) => make("button", { onclick: () => move(step) }, label);
    const figures = { score: columns.score, advantage: columns.advantage, tokens: columns.length, end: columns.end };
    const big = Object.entries(figures).map(([name, column]) => {
      const value = name === "end" ? column[sample] || "–" : figure(column[sample]);
      return make("div", {}, make("b", {}, value), make("span", { className: "soft" }, name));
    });
    return box(
      "stack",
      box(
        "bar",
        make("h2", {}, `Step ${columns.step[sample]}, ${columns.kind[sample]}`),
        make("span", { className: "soft" }, `${run}line ${columns.line[sample] + 1}`),
        box("end", button("← previous", -1), button("next →", 1), link),
      ),
      box("card scored", box("figures", big), fields([...truth, ...Object.entries(said)])),
      make("div", {}, make("h3", {}, "Prompt"), box("text prompt", opened.prompts[columns.prompt[sample]])),
      output === undefined
        ? make("div", {}, viewResponse(opened))
        : make("div", {}, make("h3", {}, "Response, whose tokens were not kept"), box("text", output)),
      make("div", {}, viewGroup(sample)),
      make("div", {}, viewSteps(sample)),
      make("div", {}, make("h3", {}, "Other fields"), fields(Object.entries(others))),
    );
  };

  // The list

  const order = { by: "step", down: true };
  let shown = [], current = null, found = null, searches = 0;

  const input = (type, label, traits = {}) =>
    make("input", { type, placeholder: label, ariaLabel: label, oninput: () => refresh(), ...traits });
  const choice = (label) => make("select", { ariaLabel: label, onchange: () => refresh() });
  const choices = { run: choice("every run"), kind: choice("every kind"), end: choice("every end") };
  const ends = ["step from", "step to", "score from", "score to"];
  const number = (label) => input("number", label, { step: "any", placeholder: label.split(" ")[1] });
  const [first, last, low, high] = ends.map(number);
  const search = input("search", "Search in all texts", { oninput: () => look(150) });
  const tally = make("span", { className: "soft", role: "status" }), leftOut = make("p", { className: "soft" });
  const spacer = box("spacer"), list = make("div", { className: "list", tabIndex: 0, ariaLabel: "Samples" }, spacer);
  const view = box("view");

  const offer = () => {
    for (const [name, menu] of Object.entries(choices)) {
      const values = [...new Set(samples.columns[name])].filter((value) => value !== "").sort(), chosen = menu.value;
      const label = (value) => (name === "run" ? data.runs[value].name : value);
      const options = values.map((value) => make("option", { value: String(value) }, label(value)));
      menu.replaceChildren(make("option", { value: "" }, menu.ariaLabel), ...options);
      menu.value = chosen;
      menu.hidden = values.length < 2;
    }
    leftOut.textContent = samples.left_out ?? "";
  };
  const passes = (sample) => {
    const { columns } = samples;
    for (const [name, menu] of Object.entries(choices)) {
      if (menu.value !== "" && String(columns[name][sample]) !== menu.value) return false;
    }
    const within = (value, { value: least }, { value: most }) => {
      if (least === "" && most === "") return true;
      return value !== null && (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
    };
    if (!within(columns.step[sample], first, last) || !within(columns.score[sample], low, high)) return false;
    return !found || found.has(sample);
  };
  const compare = (a, b) => {
    const [left, right] = [samples.columns[order.by][a], samples.columns[order.by][b]];
    if (left === right) return a - b;
    if (left === null || right === null) return left === null ? 1 : -1;
    return left < right === order.down ? 1 : -1;
  };
  const refresh = () => {
    shown = select(passes).sort(compare);
    spacer.style.height = `${shown.length * ROW}px`;
    const of = count(samples.total, "sample");
    tally.textContent = shown.length === samples.total ? of : `${shown.length.toLocaleString("en-US")} of ${of}`;
    for (const head of heads) head.ariaSort = head.name !== order.by ? "none" : order.down ? "descending" : "ascending";
    drawRows();
  };
  const rowOf = (sample) => {
    const { columns } = samples;
    const cell = (name) => (name === "end" ? columns.end[sample] : figure(columns[name][sample]));
    const cells = Object.keys(ORDERS).map((name) => make("span", {}, cell(name)));
    const row = make("a", { className: "sample", href: linkTo(sample), tabIndex: -1 }, cells, snippetOf(sample));
    row.dataset.sample = sample;
    return row;
  };
  const drawRows = () => {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const seen = Math.ceil((list.clientHeight || 600) / ROW) + 8;
    const there = new Map([...spacer.children].map((row) => [Number(row.dataset.sample), row]));
    const rows = shown.slice(from, from + seen).map((sample, place) => {
      const row = there.get(sample) ?? rowOf(sample);
      row.style.top = `${(from + place) * ROW}px`;
      row.classList.toggle("here", sample === current);
      return row;
    });
    spacer.replaceChildren(...rows);
  };
  const look = async (wait) => {
    const mine = ++searches, goesOn = () => mine === searches, hits = new Set();
    await new Promise((resolve) => setTimeout(resolve, wait));
    if (!goesOn()) return;
    const tell = () => {
      found = hits;
      refresh();
      tally.textContent += ", searching …";
      return goesOn();
    };
    if (search.value) {
      if (wait) tell();
      await searchAll(search.value, (sample) => hits.add(sample), wait ? tell : goesOn);
    }
    if (!goesOn()) return;
    found = search.value ? hits : null;
    refresh();
    highlight();
  };
  // Marks in the sample that is looked at what was searched for.
  const highlight = () => {
    const wanted = search.value.toLowerCase(), walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    const nodes = [], starts = [], ranges = [];
    let text = "";
    while (wanted && walker.nextNode()) {
      nodes.push(walker.currentNode);
      starts.push(text.length);
      text += walker.currentNode.data.toLowerCase();
    }
    const pointAt = (at, after) => {
      const node = starts.findLastIndex((start) => start <= at);
      return [nodes[node], Math.min(at - starts[node] + after, nodes[node].length)];
    };
    for (let at = text.indexOf(wanted); wanted && at >= 0 && ranges.length < 1000; at = text.indexOf(wanted, at + 1)) {
      const range = new Range();
      range.setStart(...pointAt(at, 0));
      range.setEnd(...pointAt(at + wanted.length - 1, 1));
      ranges.push(range);
    }
    CSS.highlights?.set("found", new Highlight(...ranges));
  };

  const move = (step) => {
    const place = shown.indexOf(current), next = shown[place < 0 ? 0 : Math.max(0, place + step)];
    if (next !== undefined) location.hash = linkTo(next);
  };
  const sortBy = (name) => () => {
    Object.assign(order, name === order.by ? { down: !order.down } : { by: name, down: name !== "end" });
    list.scrollTop = 0;
    refresh();
  };
  const heads = Object.entries(ORDERS).map(([name, label]) => make("button", { name, onclick: sortBy(name) }, label));
  list.addEventListener("scroll", drawRows);
  new ResizeObserver(drawRows).observe(list);
  document.addEventListener("keydown", (event) => {
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key], elsewhere = "input, select, textarea";
    if (!step || event.ctrlKey || event.metaKey || event.altKey || event.target.closest(elsewhere)) return;
    if (!section.isConnected || section.hidden) return;
    event.preventDefault();
    move(step);
  });

  const range = (label, ...ends) => make("span", { className: "range soft" }, label, ends);
  const filters = [...Object.values(choices), range("step", first, last), range("score", low, high)];
  const pane = box("pane", box("heads", heads), list);
  const section = box("samples", box("bar", search, filters, tally), leftOut, box("split", pane, view), tip);

  // Shows the sample with this key; without one the sample that was shown last, or the first of the list.
  section.open = async (key) => {
    hideTip();
    const sample = key === undefined ? (current ?? shown[0]) : samples.find(key);
    if (sample === undefined) return view.replaceChildren(box("soft", "This report has no such sample."));
    if (sample === current && view.firstChild) return;
    current = sample;
    const top = shown.indexOf(sample) * ROW, bottom = top + ROW;
    const isSeen = top >= list.scrollTop && bottom <= list.scrollTop + list.clientHeight;
    if (top >= 0 && !isSeen) list.scrollTop = top - 2 * ROW;
    drawRows();
    const made = await viewSample(sample, move);
    if (current !== sample) return;
    view.replaceChildren(made);
    highlight();
  };
  // Takes over the data of a served page: filters, place and the sample that is looked at stay.
  section.renew = (fresh) => {
    if (!fresh.samples) return;
    const key = current === null ? null : samples.key(current), place = shown.indexOf(current);
    const hits = found && [...found].map(samples.key);
    [data, samples] = [fresh, unpack(fresh.samples)];
    current = samples.find(key) ?? null;
    found = hits && new Set(hits.map(samples.find));
    spacer.replaceChildren();
    offer();
    refresh();
    if (place >= 0 && list.scrollTop) list.scrollTop += (shown.indexOf(current) - place) * ROW;
    if (search.value) look(0);
  };
  offer();
  refresh();
  return section;
};
