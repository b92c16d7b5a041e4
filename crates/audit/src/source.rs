//! A text with its lines.

use std::fs;
use std::path::Path;

use memchr::memchr_iter;

/// The text of a file, without a byte order mark; why it has none, in words.
pub(crate) fn utf8(path: &Path) -> Result<String, String> {
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    let text = String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// A text, and where its lines begin.
pub(crate) struct Lines<'a> {
    text: &'a str,
    starts: Vec<u32>,
}

/// Bytes of a line from which on columns are counted in bytes.
const LONG: usize = 1 << 16;

impl<'a> Lines<'a> {
    pub(crate) fn new(text: &'a str) -> Lines<'a> {
        let after = memchr_iter(b'\n', text.as_bytes()).map(|at| at as u32 + 1);
        Lines { text, starts: std::iter::once(0).chain(after).collect() }
    }

    /// The line of a byte and its column, both from 1; in characters, but far in lines that nobody wrote, in bytes.
    pub(crate) fn place(&self, at: u32) -> (u32, u32) {
        let line = self.starts.partition_point(|start| *start <= at).max(1);
        let start = self.starts[line - 1] as usize;
        let before = self.text.get(start..at as usize).unwrap_or_default();
        // Counting would take as long as the line for each place in it.
        let column = if before.len() < LONG { before.chars().count() } else { before.len() };
        (line as u32, column as u32 + 1)
    }

    /// A line by its number, without its end.
    pub(crate) fn line(&self, number: u32) -> &'a str {
        let index = number.saturating_sub(1) as usize;
        let Some(start) = self.starts.get(index) else { return "" };
        let end = self.starts.get(index + 1).map_or(self.text.len(), |e| *e as usize);
        self.text[*start as usize..end].trim_end_matches(['\n', '\r'])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_from_one_and_in_characters() {
        let lines = Lines::new("a\n\u{e4}b\r\n");
        assert_eq!([0, 1, 2, 4].map(|at| lines.place(at)), [(1, 1), (1, 2), (2, 1), (2, 2)]);
        assert_eq!([1, 2, 3, 9].map(|n| lines.line(n)), ["a", "\u{e4}b", "", ""]);
    }
}
