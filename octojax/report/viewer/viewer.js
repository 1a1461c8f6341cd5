// The viewer: its state, what follows from a change of it, and one drawing per frame.

class Viewer extends Commands {
  constructor(panels) {
    super();
    const byId = (id) => document.getElementById(id);
    const extent = Math.max(0, ...panels.map((p) => p.makespan_s));
    const ranks = panels.reduce((sum, p) => sum + p.ranks, 0);
    this.state = {
      panels,
      view: new View(extent),
      rows: [],
      ratio: 1,
      palette: null,
      hover: null, // {panel, event, piece}: what is pointed at
      pin: null, // the same, kept; event may be a transfer's
      chain: [], // of events that lead to what is pinned
      query: "",
      matches: null,
      match: -1,
      selection: null, // [from, to]
      critical: false,
      grouped: false,
      memory: ranks <= 12,
      memoryByDefault: ranks <= 12,
      theme: "auto",
    };
    this.stage = byId("stage");
    this.tip = byId("tip");
    this.said = byId("said");
    this.box = byId("query");
    this.count = byId("count");
    this.picture = new Picture(byId("picture"));
    this.overlay = new Overlay(byId("overlay"));
    this.minimap = new Minimap(...byId("minimap").children);
    this.details = new Details(byId("details"), (panel, event) => this.go(panel, event));
    this.pointer = null;
    this.frames = []; // milliseconds of CPU that the last frames took
    this.wanted = { all: false, over: false };
    readAddress(this.state, location.hash);
    this.applyTheme();
    this.applyState();
    this.resize();
    this.listen(byId);
  }

  listen(byId) {
    listenToPicture(this.stage, this);
    listenToMinimap(byId("minimap"), this);
    listenToKeys(this);
    new ResizeObserver(() => this.resize()).observe(byId("middle"));
    addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.applyTheme());
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) === this.address) return;
      readAddress(this.state, location.hash);
      this.applyTheme();
      this.applyState();
      this.resize();
    });
    this.box.addEventListener("input", () => this.setQuery(this.box.value));
    this.box.addEventListener("keydown", (e) => {
      if (e.key !== "Enter") return;
      this.nextMatch(e.shiftKey ? -1 : 1);
      e.preventDefault();
    });
    for (const name of ["critical", "memory", "grouped"]) {
      byId(name).addEventListener("click", () => this.toggle(name));
    }
    byId("grouped").hidden = this.state.panels.length < 2;
    byId("fit").addEventListener("click", () => this.fit());
    byId("help").addEventListener("click", () => this.help());
    byId("theme").addEventListener("change", (e) => {
      this.state.theme = e.target.value;
      this.applyTheme();
      this.remember();
    });
    const list = byId("keys");
    for (const [keys, what] of KEYS) {
      list.append(
        node("dt", {}, ...keys.flatMap((key) => [node("kbd", {}, key), " "])),
        node("dd", {}, what),
      );
    }
  }

  /** After a change of theme: reads the colours anew. */
  applyTheme() {
    const { theme } = this.state;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    document.getElementById("theme").value = theme;
    this.state.palette = paletteOf(document.documentElement);
    this.minimap.reset();
    drawLegend(document.getElementById("legend"), this.state);
    this.request();
  }

  /** After a change of anything but the view: search, dimming, buttons, text. */
  applyState() {
    const { state } = this;
    state.matches = search(state.panels, state.query);
    if (this.box.value !== state.query) this.box.value = state.query;
    this.showCount();
    state.chain = state.pin?.event >= 0 ? chainTo(state.pin.panel, state.pin.event) : [];
    for (const name of ["critical", "memory", "grouped"]) {
      document.getElementById(name).setAttribute("aria-pressed", String(state[name]));
    }
    this.applyMasks();
    this.minimap.reset();
    this.details.draw(state);
    this.layOut();
    this.request();
    this.remember();
  }

  /** Dims what was not searched, or does not belong to the critical path. */
  applyMasks() {
    const { panels, matches, critical } = this.state;
    for (const panel of panels) {
      panel.mask = matches || critical ? new Uint8Array(panel.count) : null;
    }
    if (matches) for (const { panel, event } of matches) panel.mask[event] = 1;
    else if (critical) {
      for (const panel of panels) {
        for (const event of panel.criticalPath) if (event < panel.count) panel.mask[event] = 1;
      }
    }
  }

  hover(x, y, clientX, clientY) {
    const thing = this.thingAt(x, y);
    const row = this.state.view.rowAt(this.state.rows, y);
    if (!thing && !(row && (x < this.state.view.left || row.rank < 0))) return this.leave();
    this.state.hover = thing;
    this.request("over");
    const { panel, rank } = row; // of a heading -1
    let lines;
    if (rank < 0) lines = [panel.heading, panel.note].filter(Boolean);
    else if (!thing) lines = rankLines(panel, rank, this.state.panels[0]);
    else if (thing.inMemory) lines = memoryLines(panel, rank, this.state.view.timeAt(x));
    else if (thing.event >= 0) lines = actionLines(panel, thing.event);
    else lines = [...idleLines(panel, thing.piece), `rank ${rank}`];
    if (this.state.panels.length > 1) lines.push(`${panel.letter}: ${panel.title}`);
    this.tip.replaceChildren(...lines.map((line, i) => node(i ? "div" : "strong", {}, line)));
    this.tip.hidden = false;
    const box = this.tip.getBoundingClientRect();
    const left = clientX + 16 + box.width > innerWidth ? clientX - box.width - 12 : clientX + 16;
    const top = clientY + 18 + box.height > innerHeight ? clientY - box.height - 12 : clientY + 18;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${Math.max(0, top)}px`;
  }

  leave() {
    this.tip.hidden = true;
    if (!this.state.hover) return;
    this.state.hover = null;
    this.request("over");
  }

  /** Returns `[time, label]` of the marks on the axis. */
  ticks() {
    const { view, panels } = this.state;
    return ticksOf(view.from, view.to, view.plot / 110, panels[0]?.unit ?? "s");
  }

  /** Tells people who listen instead of looking. */
  say(text) {
    this.said.textContent = text;
  }

  moved() {
    this.leave();
    this.request();
    this.remember();
  }

  resize() {
    const { state } = this;
    const middle = document.getElementById("middle");
    const width = Math.max(240, Math.floor(document.getElementById("pictures").clientWidth));
    state.ratio = devicePixelRatio || 1;
    state.view.width = width;
    state.view.left = width < 500 ? 64 : 96;
    this.layOut();
    middle.style.setProperty("--height", `${state.view.height}px`);
    this.request();
  }

  layOut() {
    const { state } = this;
    const room = Math.max(240, innerHeight - 230);
    const { rows, height } = rowsOf(state.panels, { ...state, room: room - AXIS });
    state.rows = rows;
    state.view.rowsHeight = height;
    state.view.height = Math.min(height + AXIS, room);
    this.stage.style.height = `${state.view.height}px`;
    state.view.scrollTo(state.view.scroll);
  }

  /** Asks for a drawing with the next frame: of all, or of what lies above the rows. */
  request(what = "all") {
    const idle = !this.wanted.all && !this.wanted.over;
    this.wanted[what] = true;
    if (idle) requestAnimationFrame(() => this.draw());
  }

  draw() {
    const begin = performance.now();
    const { all } = this.wanted;
    this.wanted = { all: false, over: false };
    if (all) {
      this.picture.draw(this.state);
      this.minimap.draw(this.state);
    }
    this.overlay.draw(this.state);
    this.frames.push(performance.now() - begin);
    if (this.frames.length > 240) this.frames.shift();
  }

  /** Writes the state into the address, once it has come to rest. */
  remember() {
    clearTimeout(this.remembering);
    this.remembering = setTimeout(() => {
      this.address = addressOf(this.state);
      history.replaceState(
        null,
        "",
        this.address ? `#${this.address}` : location.pathname + location.search,
      );
    }, 150);
  }
}
