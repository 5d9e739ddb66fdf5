// On a phone a table's rows are stacked (site.css): each cell shows its column's name.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".table-wrapper table")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => { if (column) cell.dataset.column = names[column] ?? ""; });
    }
  }
});
