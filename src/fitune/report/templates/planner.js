const by = (id) => document.getElementById(id);
const form = by("question"), answers = ["answer", "ways", "clusters"];
let asked = 0, timer = 0;

function query() {
  const pairs = [...new FormData(form)].filter(([, value]) => value.trim());
  return String(new URLSearchParams(pairs));
}

// The newest question alone is shown: an older answer that comes late is dropped.
async function ask() {
  const number = ++asked, text = query();
  history.replaceState(null, "", text ? "?" + text : location.pathname);
  by("offers").hidden = true;
  if (!form.elements.model.value.trim() && !form.elements.config.value.trim()) {
    for (const name of answers) by(name).replaceChildren();
    return;
  }
  for (const name of answers) {
    const place = by(name);
    place.ariaBusy = "true";
    try {
      const reply = await fetch(name + "?" + text);
      const html = await reply.text();
      if (number !== asked) return;
      if (reply.ok) place.innerHTML = html;  // escaped by the server; the page's policy runs no script in it
      else place.textContent = html;
      by("state").textContent = "";
    } catch {
      if (number !== asked) return;
      by("state").textContent = "No answer. If fitune ui has ended: fitune ui 'THE ADDRESS OF THIS PAGE'";
    } finally {
      if (number === asked) place.ariaBusy = "false";
    }
  }
}

async function copy(text, button) {
  const words = button.textContent;
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { button.textContent = "Select it and copy"; }
  setTimeout(() => { button.textContent = words; }, 1500);
}

function sort(head) {
  const column = head.cellIndex, table = head.closest("table"), down = head.ariaSort === "ascending";
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) =>
    (down ? -1 : 1) * String(key(a)).localeCompare(String(key(b)), "en", { numeric: true }));
  const isNumber = rows.every((row) => row.cells[column].dataset.value !== undefined);
  if (isNumber) rows.sort((a, b) => (down ? -1 : 1) * (key(a) - key(b)));
  for (const one of table.tHead.rows[0].cells) one.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  table.tBodies[0].append(...rows);
}

// One kind of card after the other, so that rows come while the rest is planned; another question ends it.
async function rent(button) {
  const table = by("offers"), text = query(), cards = button.dataset.cards.split(" ");
  table.tBodies[0].replaceChildren();
  table.hidden = false;
  for (const [number, card] of cards.entries()) {
    by("renting").textContent = `${number} of ${cards.length}`;
    const html = await (await fetch(`rent?${text}&card=${card}`)).text();
    if (query() !== text) break;
    table.tBodies[0].insertAdjacentHTML("beforeend", html);  // escaped by the server
  }
  by("renting").textContent = "";
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.copy) copy(by(button.dataset.copy).textContent, button);
  else if (button.id === "link") copy(location.href, button);
  else if (button.id === "rent") rent(button);
  else if (button.closest("th")) sort(button.closest("th"));
});
if (form) {
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, 150); });
  ask();
}
