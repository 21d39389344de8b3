// The markup of chat templates in texts.
const chat = (() => {
  const END = "<\\|[^<>|\\s]+\\|>|</?s>|<(?:bos|eos|end_of_turn|start_of_turn)>"; // what templates put around messages
  const ROLE =
    "(?:<\\|im_start\\|>|<start_of_turn>)(\\w+)\\n|<\\|start_header_id\\|>(\\w+)<\\|end_header_id\\|>\\n*|" +
    "<\\|(system|developer|user|assistant|tool)\\|>\\n?";
  const PICTURE = "\\u{fdd1}(data:image/png;base64,[\\w+/=]+)\\u{fdd1}"; // samples.py puts them there
  const MARKUP = new RegExp(`(?:(?:${END})\\n?){0,3}?(?:${ROLE})|(?:${END})\\n?|${PICTURE}`, "gu"), WHOLE = new RegExp(`^(?:${END})$`, "u");
  const isSpecial = (text) => WHOLE.test(text);
  // Splits a prompt at its markup: {text}, {picture}, or {chip, raw}, where a chip is the role whose message begins.
  const split = (prompt) => {
    const parts = [];
    let from = 0;
    for (const { 0: raw, index, ...groups } of prompt.matchAll(MARKUP)) {
      const chip = groups[1] ?? groups[2] ?? groups[3] ?? raw.trim();
      parts.push({ text: prompt.slice(from, index) }, groups[4] ? { picture: groups[4] } : { chip, raw });
      from = index + raw.length;
    }
    return [...parts, { text: prompt.slice(from) }].filter(({ text }) => text !== "");
  };
  return { isSpecial, split };
})();

// The tab of samples: a list, and the sample that is looked at. Columns of all samples are there at once; a chunk of
// tokens is opened when it is first looked at. samples.py says how they are packed.
const samplesTab = ({ make, box, fields, figure, figures, count, visible }, data) => {
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
    const mask = new Uint8Array(buffer, start);
    numbers.mask = { top: 2, at: (token) => mask[token] };
    return { ids: new Uint32Array(buffer, 0, chunk.tokens), mask, numbers, details };
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
      let said = "", token = start, count = 0;
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

  // Yields the samples of each chunk that have the text in a prompt, their tokens or other fields.
  const searchAll = async function* (query) {
    const wanted = query.toLowerCase(), has = (text) => text.toLowerCase().includes(wanted);
    const { columns, chunks, tables } = samples, [words, prompts] = await tables();
    const asked = prompts.map(has), texts = words.texts.map((text) => text.toLowerCase());
    for (const chunk of chunks) {
      const { ids, details } = await chunk.open();
      let token = 0;
      const isHit = ({ rows, said, about }, place) => {
        const sample = chunk.first + place, end = token + columns.tokens[sample];
        let text = "";
        for (; token < end; token++) text += texts[ids[token]];
        if (text.includes(wanted) || [[columns.prompt[sample]], ...rows].some(([prompt]) => asked[prompt])) return true;
        return [said, about].some((part) => Object.values(part).some((value) => has(plain(value))));
      };
      yield details.flatMap((detail, place) => (isHit(detail, place) ? [chunk.first + place] : []));
    }
  };
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

  // The colours of tokens

  let chosen = "advantage"; // what tokens are coloured by, where it was computed
  const blend = (shade, percent) => `color-mix(in srgb, var(${shade}) ${percent}%, transparent)`;
  const MASKS = [
    ["the environment's", "var(--card)"],
    ["trained", blend("--plus", 25)],
    ["the policy's, not in the loss", blend("--minus", 40)],
  ];
  const shadeOf = (name, value, top) => {
    if (value === null) return "";
    if (name === "mask") return MASKS[value][1];
    const strength = value === 0 ? 0 : Math.round(12 + 56 * Math.min(1, Math.abs(value) / top));
    return blend(SHADES[name] ?? (value > 0 ? "--plus" : "--minus"), strength);
  };
  const legendOf = (name, numbers) => {
    const { top } = numbers[name];
    const swatch = (background, className = "") => make("i", { className, style: `background:${background}` });
    if (name === "mask") return [1, 2, 0].flatMap((mask) => [swatch(MASKS[mask][1]), MASKS[mask][0]]);
    const low = name === "entropy" ? 0 : -top, high = name === "log_prob" ? 0 : top;
    const shades = [0, 0.25, 0.5, 0.75, 1].map((part) => shadeOf(name, low + part * (high - low), top));
    const ramp = swatch(`linear-gradient(90deg,${shades})`, "ramp");
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

  // The tokens, first and last, in which the policy last said what the reward read as its answer, which is not within a
  // longer word or number; [] if it did not.
  const answerIn = ({ ids, mask, words, start, end, detail }) => {
    const answer = String(detail.said.answer ?? "").trim(), ends = [];
    let said = "";
    for (let token = start; token < end; token++) {
      said += mask[token] ? words.texts[ids[token]] : "\n";
      ends.push(said.length);
    }
    const literally = answer.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
    const whole = new RegExp(`(?<!\\p{L}|\\p{N}[.,]?)${literally}(?!\\p{L}|[.,]?\\p{N})`, "gu");
    const at = answer ? [...said.matchAll(whole)].at(-1)?.index : undefined;
    if (at === undefined) return [];
    return [at, at + answer.length - 1].map((place) => start + ends.findIndex((end) => end > place));
  };

  // What the tip says of a token.
  const tellOf = (token, { ids, mask, numbers, words, start, end }, inAnswer) => {
    const known = Object.keys(numbers).filter((name) => name !== "mask" && (mask[token] || name === "reward"));
    const told = known.map((name) => [name, numbers[name].at(token)]).filter(([, value]) => value !== null);
    const logProb = mask[token] ? (numbers.log_prob?.at(token) ?? null) : null;
    return [
      ["token", JSON.stringify(words.texts[ids[token]])],
      ["id", String(words.ids[ids[token]])],
      ["place", `${token - start + 1} of ${end - start}`],
      ...(mask[token] === 1 ? [] : [["trained", mask[token] ? "no: left out of the loss" : "no: the environment's"]]),
      ...(inAnswer ? [["answer", "as the reward read it"]] : []),
      ...told.map(([name, value]) => [nameOf(name), figure(value)]),
      ...(logProb === null ? [] : [["probability", `${figure(100 * Math.exp(logProb))} %`]]),
    ];
  };

  // Shows a prompt with its markup as chips on lines of their own, so that a map's first line begins where others do.
  const viewPrompt = (className, prompt) => {
    const part = ({ text, picture, chip, raw }) => {
      if (picture) return make("img", { className: "picture", src: picture, alt: "an image of the prompt" });
      return text ?? make("span", { className: "special", title: raw }, chip);
    };
    return box(className, chat.split(prompt).map(part));
  };
  // Shows the tokens of an opened sample: what the policy said and, set apart, what the environment said, with rewards
  // at their places. `paint` colours a token's element.
  const viewTokens = (opened, paint) => {
    const { ids, mask, numbers, words, prompts, start, detail } = opened, [first, last] = answerIn(opened);
    const inAnswer = (token) => token >= first && token <= last;
    const spanOf = (token) => {
      const text = words.texts[ids[token]], kind = text === "" ? " part" : text.trim() ? "" : " blank";
      const special = chat.isSpecial(text) ? " special" : "";
      const className = `token${kind}${special}${inAnswer(token) ? " answer" : ""}`;
      const span = make("span", { className, tabIndex: token === start ? 0 : -1 }, text);
      span.dataset.token = token;
      span.dataset.mark = text === "" ? "·" : "↵".repeat(text.split("\n").length - 1);
      paint(span);
      const reward = numbers.reward?.at(token), sign = reward > 0 ? "+" : "";
      return reward ? [span, make("span", { className: "reward", title: "reward" }, sign + figure(reward))] : [span];
    };
    // Adds tokens to `into`, SHOWN_TOKENS at once, in parts by whose they are.
    const fill = (from, to, into) => {
      const now = Math.min(to, from + SHOWN_TOKENS);
      for (let token = from; token < now; ) {
        const policy = mask[token] > 0, part = box(policy ? "said" : "environment");
        for (; token < now && mask[token] > 0 === policy; token++) part.append(...spanOf(token));
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
      if (place) all.append(viewPrompt("environment prompt", prompts[prompt]));
      all.append(box("row"));
      fill(from, (from += length), all.lastChild);
    });

    const describe = ({ target }) => {
      const span = target.closest(".token"), token = Number(span?.dataset.token);
      if (span) showTip(span, tellOf(token, opened, inAnswer(token)));
      else hideTip();
    };
    const walk = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], spans = [...all.querySelectorAll(".token")];
      if (!step) return;
      event.preventDefault();
      spans[spans.indexOf(event.target) + step]?.focus();
    };
    const acts = { pointerover: describe, focusin: describe, pointerleave: hideTip, focusout: hideTip, keydown: walk };
    for (const [name, act] of Object.entries(acts)) all.addEventListener(name, act);
    return all;
  };

  const viewResponse = (opened) => {
    const { mask, numbers } = opened, modes = Object.keys(numbers), legend = box("legend");
    const options = modes.map((name) => make("option", { value: name }, nameOf(name)));
    const select = make("select", { id: "colour", ariaLabel: "Colour of tokens" }, options);
    const paint = (span) => {
      const token = Number(span.dataset.token), { at, top } = numbers[select.value];
      span.style.background = mask[token] ? shadeOf(select.value, at(token), top) : "";
    };
    select.value = modes.includes(chosen) ? chosen : modes[0];
    const tokens = viewTokens(opened, paint), tell = () => legend.replaceChildren(...legendOf(select.value, numbers));
    select.onchange = () => {
      chosen = select.value;
      tokens.querySelectorAll(".token").forEach(paint);
      tell();
    };
    tell();
    return [box("bar", make("h3", {}, "Response"), make("label", {}, "coloured by ", select), legend), tokens];
  };

  const runOf = (sample, before = "", after = "") =>
    data.runs.length > 1 ? before + data.runs[samples.columns.run[sample]].name + after : "";
  const cellOf = (sample, name) => {
    const value = samples.columns[name][sample];
    return name === "end" ? value : figure(value);
  };
  const linkTo = (sample) => `#sample=${samples.key(sample)}`;
  const link = (sample, className, ...children) =>
    make("a", { href: linkTo(sample), className: sample === current ? `${className} here` : className }, children);
  const select = (fits) => {
    const found = [];
    for (let sample = 0; sample < samples.total; sample++) if (fits(sample)) found.push(sample);
    return found;
  };
  const snippetOf = (sample, most = SNIPPET, before = "") => {
    const snippet = make("span", { className: "snippet" });
    samples.text(sample, most).then((text) => (snippet.textContent = visible(before + text)));
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
    const row = (other) => {
      const { score, advantage, end } = columns, figures = [score, advantage].map((column) => figure(column[other]));
      const cells = [...figures, bar(advantage[other]), end[other]].map((cell) => make("span", {}, cell));
      return link(other, "member", cells, snippetOf(other));
    };
    const heads = ["score", "advantage", "", "end", ""].map((head) => make("span", { className: "soft" }, head));
    const title = make("h3", {}, `Its group: ${count(members.length, "sample")} of one prompt`);
    return [title, box("member", heads), members.map(row)];
  };

  // Shows what became of the same prompt at other steps, a column for each, and for each run.
  const viewSteps = (sample) => {
    const { columns } = samples, same = (name, other) => columns[name][other] === columns[name][sample];
    const alike = select((other) => same("item", other) && same("kind", other));
    alike.sort((a, b) => columns.step[a] - columns.step[b] || columns.run[a] - columns.run[b] || a - b);
    const steps = new Map();
    for (const other of alike) {
      const title = `step ${columns.step[other]}${runOf(other, ", ")}`;
      if (!steps.has(title)) steps.set(title, box("step", make("b", {}, title)));
      const column = steps.get(title);
      if (column.children.length > FEW_SAMPLES && other !== sample) continue;
      const score = make("b", {}, `score ${figure(columns.score[other])}`);
      column.append(link(other, "text", score, "\n", snippetOf(other, 1000)));
    }
    if (steps.size < 2) return [];
    const place = box("steps", [...steps.values()]);
    requestAnimationFrame(() => (place.scrollLeft = place.querySelector(".here").offsetLeft - place.offsetLeft - 100));
    return [make("h3", {}, "The same prompt over the steps"), place];
  };

  const viewSample = async (sample) => {
    const { columns } = samples, opened = await samples.open(sample), { said, about } = opened.detail;
    const { gts, ...others } = about, truth = gts == null ? [] : [["ground truth", gts]];
    const button = (label, step, key) => make("button", { onclick: () => move(step), title: `key ${key}` }, label);
    const big = { score: "score", advantage: "advantage", tokens: "length", end: "end" };
    const told = Object.entries(big).map(([name, column]) => [name, cellOf(sample, column) || "–"]);
    const address = make("a", { className: "button", href: linkTo(sample), title: "to copy or to open" }, "link");
    const part = (title, ...shown) => make("div", {}, make("h3", {}, title), shown);
    return box(
      "stack",
      box(
        "bar",
        make("h2", {}, `Step ${columns.step[sample]}, ${columns.kind[sample]}`),
        make("span", { className: "soft" }, `${runOf(sample, "", ", ")}line ${columns.line[sample] + 1}`),
        box("end", button("← previous", -1, "k"), button("next →", 1, "j"), address),
      ),
      box("card scored", figures(told), fields([...truth, ...Object.entries(said)])),
      part("Prompt", viewPrompt("text prompt", opened.prompts[columns.prompt[sample]])),
      make("div", {}, viewResponse(opened)),
      make("div", {}, viewGroup(sample)),
      make("div", {}, viewSteps(sample)),
      part("Other fields", fields(Object.entries(others))),
    );
  };

  // The list

  const order = { by: "step", down: true };
  let shown = [], current = null, found = null, searches = 0;

  const input = (type, label, traits = {}) =>
    make("input", { type, placeholder: label, ariaLabel: label, oninput: () => refresh(), ...traits });
  const choice = (label) => make("select", { ariaLabel: label, onchange: () => refresh() });
  const choices = { run: choice("every run"), kind: choice("every kind"), end: choice("every end") };
  const end = (name, word) => input("number", `${name} ${word}`, { step: "any", placeholder: word });
  const range = (name) => [end(name, "from"), end(name, "to")], ranges = { step: range("step"), score: range("score") };
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
    const valueOf = (name) => samples.columns[name][sample];
    const isChosen = ([name, { value }]) => value === "" || String(valueOf(name)) === value;
    const isWithin = ([name, [{ value: least }, { value: most }]]) =>
      (least === "" && most === "") ||
      (valueOf(name) !== null && valueOf(name) >= (least || -Infinity) && valueOf(name) <= (most || Infinity));
    if (!Object.entries(choices).every(isChosen) || !Object.entries(ranges).every(isWithin)) return false;
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
    const cells = Object.keys(ORDERS).map((name) => make("span", {}, cellOf(sample, name)));
    if (samples.columns.kind[sample] === "validation") cells[0].append(" val");
    const row = link(sample, "sample", cells, snippetOf(sample, SNIPPET, runOf(sample, "", ": ")));
    row.dataset.sample = sample;
    row.tabIndex = -1;
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
  // Searches after `wait` ms without another key; then the list, unless `wait` is 0, shows what was found so far.
  const look = async (wait) => {
    const mine = ++searches, hits = new Set(), pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
    let since = 0;
    await pause(wait);
    if (mine !== searches) return;
    for await (const more of search.value ? searchAll(search.value) : []) {
      more.forEach((sample) => hits.add(sample));
      if (performance.now() - since > 150) {
        if (wait) {
          found = hits;
          refresh();
          tally.textContent += ", searching …";
        }
        await pause(0);
        since = performance.now();
      }
      if (mine !== searches) return;
    }
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
    const inList = pane.contains(event.target) ? { ArrowDown: 1, ArrowUp: -1 } : {}; // elsewhere they scroll the page
    const step = { j: 1, k: -1, ...inList }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
    if (!section.isConnected || section.hidden) return;
    event.preventDefault();
    if (pane.contains(event.target)) list.focus({ preventScroll: true }); // its rows come and go
    move(step);
  });

  const limits = Object.entries(ranges).map(([name, ends]) => make("span", { className: "range soft" }, name, ends));
  const pane = box("pane", box("heads", heads), list);
  const bar = box("bar", search, Object.values(choices), limits, tally);
  const section = box("samples", bar, leftOut, box("split", pane, view), tip);

  // Shows the sample with this key; without one the sample that was shown last, or the first of the list.
  section.open = async (key) => {
    hideTip();
    const sample = key === undefined ? (current ?? shown[0]) : samples.find(key);
    if (sample === current && view.firstChild) return;
    current = sample ?? null;
    if (current === null) {
      drawRows();
      return view.replaceChildren(box("soft", "This report has no such sample."));
    }
    const top = shown.indexOf(sample) * ROW, bottom = top + ROW;
    const isSeen = top >= list.scrollTop && bottom <= list.scrollTop + list.clientHeight;
    if (top >= 0 && !isSeen) list.scrollTop = top - 2 * ROW;
    drawRows();
    const made = await viewSample(sample);
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
