const by = (id) => document.getElementById(id);

// A page that nobody sees asks for nothing.
async function look() {
  if (document.hidden) return;
  try {
    const reply = await fetch("runs-table");
    if (!reply.ok) throw new Error();
    by("runs").innerHTML = await reply.text();  // escaped by the server; the page's policy runs no script in it
    by("state").textContent = "";
  } catch {
    by("state").textContent = "No answer: is fitune ui still running?";
  }
}

setInterval(look, 5000);
document.addEventListener("visibilitychange", look);
