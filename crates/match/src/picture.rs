//! A matrix as a picture: source ranks down, destination ranks across.

use svg::Document;
use svg::node::element::{Group, Line, Rectangle, Style, Text, Title};

use crate::bind::Amount;
use crate::matrix::{Flow, Matrix};

/// Width of a character of the font, as a share of its size. The font is one of equal widths.
const CHAR_WIDTH: f64 = 0.61;
/// Ranks from one heavy line to the next, so that a row or column can be followed through a large matrix.
const BAND: usize = 8;
const MARGIN: f64 = 16.0;
const STYLE: &str = "text { font-family: 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #222 } \
    .middle { text-anchor: middle } .end { text-anchor: end } .head { fill: #555 } .on-dark { fill: #fff } \
    .title { font-weight: bold }";

/// Sizes that follow from what is to be written.
struct Grid {
    font: f64,
    cell_width: f64,
    cell_height: f64,
    /// Where the cells begin.
    left: f64,
    top: f64,
}

impl Matrix {
    /// A picture of the matrix as an SVG document: each cell says bytes, pieces and layers, and is the darker the more bytes
    /// it has. Zoom in, or hover over a cell, where there are many.
    pub fn to_svg(&self) -> String {
        let (sent, received) = (self.sent(), self.received());
        let row_heads: Vec<String> =
            self.sources.iter().map(|rank| format!("{rank}: {}", bytes(amount(&sent, *rank).bytes))).collect();
        let grid = self.grid(&row_heads);
        let (right, bottom) = (grid.x(self.destinations.len()), grid.y(self.sources.len()));
        let width = (right + grid.font * 4.0 + MARGIN).max(560.0);
        let height = bottom + grid.font * 1.5 + MARGIN;

        let mut document = Document::new()
            .set("viewBox", (0.0, 0.0, round(width), round(height)))
            .set("width", round(width))
            .set("height", round(height))
            .add(Style::new(STYLE))
            .add(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "#fff"));
        for text in self.heading(&grid) {
            document = document.add(text);
        }
        for (index, head) in row_heads.into_iter().enumerate() {
            let middle = grid.y(index) + grid.cell_height / 2.0 + grid.font * 0.35;
            document = document.add(text(&head, grid.left - grid.font * 0.6, middle, grid.font, "end head"));
            // Once more on the other side: the way across may be long.
            let rank = self.sources[index].to_string();
            document = document.add(text(&rank, right + grid.font * 0.6, middle, grid.font, "head"));
        }
        for (index, rank) in self.destinations.iter().enumerate() {
            let middle = grid.x(index) + grid.cell_width / 2.0;
            let (rank, bytes) = (rank.to_string(), bytes(amount(&received, *rank).bytes));
            let heads = [(&rank, grid.top - grid.font * 1.9), (&bytes, grid.top - grid.font * 0.7)];
            for (head, baseline) in heads.into_iter().chain([(&rank, bottom + grid.font * 1.3)]) {
                document = document.add(text(head, middle, baseline, grid.font, "middle head"));
            }
        }
        document.add(self.lines(&grid)).add(self.cells(&grid)).to_string()
    }

    fn grid(&self, row_heads: &[String]) -> Grid {
        let font = if self.destinations.len() > 16 { 9.0 } else { 13.0 };
        let longest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0).max(7) as f64;
        let lines = self.flows.iter().flat_map(lines);
        let cell_chars = longest(&mut lines.map(|line| line.chars().count()));
        let head_chars = longest(&mut row_heads.iter().map(|head| head.chars().count()));
        Grid {
            font,
            cell_width: (cell_chars + 1.2) * font * CHAR_WIDTH,
            cell_height: font * 4.2,
            left: MARGIN + (head_chars + 1.0) * font * CHAR_WIDTH,
            top: MARGIN + 60.0 + font * 3.0,
        }
    }

    /// What the picture is of, and how to read it.
    fn heading(&self, grid: &Grid) -> [Text; 3] {
        let Amount { bytes: total, pieces, runs } = self.total();
        let (first, last) = (self.chunk.tokens.start, self.chunk.tokens.end);
        let tokens = match self.chunk.is_last() {
            true if first == 0 => format!("a request of {last} tokens"),
            _ => format!("tokens {first}..{last} of a request of {}", self.chunk.request_tokens),
        };
        let title = format!("{} source ranks to {} destination ranks", self.sources.len(), self.destinations.len());
        let moved = format!("{tokens}: {} in {} pieces, {} runs", bytes(total), count(pieces), count(runs));
        let key = "sources down, destinations across; a cell: bytes, pieces, layers";
        [
            text(&title, MARGIN, MARGIN + 12.0, 16.0, "title"),
            text(&moved, MARGIN, MARGIN + 32.0, 13.0, ""),
            text(key, MARGIN, MARGIN + 50.0, grid.font.max(11.0), "head"),
        ]
    }

    /// The lines between ranks.
    fn lines(&self, grid: &Grid) -> Group {
        let (rows, columns) = (self.sources.len(), self.destinations.len());
        let (right, bottom) = (grid.x(columns), grid.y(rows));
        let mut group = Group::new();
        let mut line = |from: (f64, f64), to: (f64, f64), index: usize, count: usize| {
            let heavy = index.is_multiple_of(BAND) || index == count;
            let line = Line::new()
                .set("x1", round(from.0))
                .set("y1", round(from.1))
                .set("x2", round(to.0))
                .set("y2", round(to.1))
                .set("stroke", if heavy { "#999" } else { "#e4e4e4" });
            group = std::mem::replace(&mut group, Group::new()).add(line);
        };
        // The heavy ones are drawn over the others.
        for heavy in [false, true] {
            let is = |index: usize, count: usize| (index.is_multiple_of(BAND) || index == count) == heavy;
            for row in (0..=rows).filter(|row| is(*row, rows)) {
                line((grid.left, grid.y(row)), (right, grid.y(row)), row, rows);
            }
            for column in (0..=columns).filter(|column| is(*column, columns)) {
                line((grid.x(column), grid.top), (grid.x(column), bottom), column, columns);
            }
        }
        group
    }

    fn cells(&self, grid: &Grid) -> Group {
        let most = self.flows.iter().map(|flow| flow.amount.bytes).max().unwrap_or(0);
        let mut cells = Group::new();
        for flow in &self.flows {
            let (Ok(row), Ok(column)) = (
                self.sources.binary_search(&flow.source_rank),
                self.destinations.binary_search(&flow.destination_rank),
            ) else {
                continue;
            };
            cells = cells.add(cell(flow, grid, grid.x(column), grid.y(row), most));
        }
        cells
    }
}

fn cell(flow: &Flow, grid: &Grid, left: f64, top: f64, most: u64) -> Group {
    let share = if most == 0 { 0.0 } else { flow.amount.bytes as f64 / most as f64 };
    let hover = format!(
        "{} to {}: {} bytes, {} pieces, {} runs, {} rows of layers {}",
        flow.source_rank,
        flow.destination_rank,
        flow.amount.bytes,
        flow.amount.pieces,
        flow.amount.runs,
        flow.rows,
        flow.layers
    );
    let area = Rectangle::new()
        .set("x", round(left + 1.0))
        .set("y", round(top + 1.0))
        .set("width", round(grid.cell_width - 2.0))
        .set("height", round(grid.cell_height - 2.0))
        .set("fill", colour(share));
    let mut cell = Group::new().add(Title::new(hover)).add(area);
    let class = if share > 0.5 { "middle on-dark" } else { "middle" };
    for (line, index) in lines(flow).iter().zip(1..) {
        let baseline = top + grid.font * (1.15 * f64::from(index) + 0.15);
        cell = cell.add(text(line, left + grid.cell_width / 2.0, baseline, grid.font, class));
    }
    cell
}

/// What is written in a cell. Of layers that are many ranges, the first and the last: hovering shows all.
fn lines(flow: &Flow) -> [String; 3] {
    let layers = flow.layers.to_string();
    let ranges: Vec<&str> = layers.split(", ").collect();
    let layers = match ranges.as_slice() {
        [first, .., last] if layers.len() > 14 => format!("{first} ~ {last}"),
        _ => layers,
    };
    [bytes(flow.amount.bytes), count(flow.amount.pieces), layers]
}

/// From a light blue to a dark one.
fn colour(share: f64) -> String {
    let [red, green, blue] = [(222, 8), (235, 69), (247, 148)].map(|(none, all)| {
        let (none, all) = (f64::from(none), f64::from(all));
        (none + (all - none) * share).round()
    });
    format!("rgb({red},{green},{blue})")
}

fn amount(amounts: &std::collections::BTreeMap<u32, Amount>, rank: u32) -> Amount {
    amounts.get(&rank).copied().unwrap_or_default()
}

fn text(content: &str, x: f64, y: f64, size: f64, class: &str) -> Text {
    let text = Text::new(content).set("x", round(x)).set("y", round(y)).set("font-size", size);
    if class.is_empty() { text } else { text.set("class", class) }
}

/// Tenths are enough, and keep the file small.
fn round(length: f64) -> f64 {
    (length * 10.0).round() / 10.0
}

/// Three digits or so, and a unit.
fn bytes(bytes: u64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], " ")
}

fn count(count: u64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G", "T", "P", "E"], "")
}

fn scaled(number: u64, step: f64, units: &[&str], space: &str) -> String {
    let mut scaled = number as f64;
    let mut unit = 0;
    // What would be rounded up to a whole step takes the next unit.
    while scaled >= step - 0.5 && unit + 1 < units.len() {
        scaled /= step;
        unit += 1;
    }
    let digits = if unit > 0 && scaled < 9.995 { 2 } else { usize::from(unit > 0 && scaled < 99.95) };
    format!("{scaled:.digits$}{space}{}", units[unit]).trim_end().to_owned()
}

impl Grid {
    /// Left edge of a column.
    fn x(&self, column: usize) -> f64 {
        self.left + self.cell_width * column as f64
    }

    /// Upper edge of a row.
    fn y(&self, row: usize) -> f64 {
        self.top + self.cell_height * row as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let check = |number: u64, as_bytes: &str, as_count: &str| {
            assert_eq!((bytes(number).as_str(), count(number).as_str()), (as_bytes, as_count));
        };
        check(0, "0 B", "0");
        check(999, "999 B", "999");
        check(1000, "1000 B", "1.00k");
        check(1024, "1.00 KiB", "1.02k");
        check(131_072, "128 KiB", "131k");
        check(75_497_472, "72.0 MiB", "75.5M");
        check(u64::MAX, "16.0 EiB", "18.4E");
    }
}
