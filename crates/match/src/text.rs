//! Tables for a terminal.

/// Columns padded to their widest cell, two spaces apart, one line a row, each ended by a newline.
pub(crate) fn table<const N: usize>(head: [&str; N], lines: impl Iterator<Item = [String; N]>) -> String {
    let lines: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(lines).collect();
    let mut widths = [0; N];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for line in &lines {
        let mut row = String::new();
        for (cell, width) in line.iter().zip(widths) {
            row.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn pads_columns() {
        let lines = [["1", "lat"], ["1000", "x"]].map(|line| line.map(str::to_owned));
        assert_eq!(super::table(["a", "role"], lines.into_iter()), "a     role\n1     lat\n1000  x\n");
    }
}
