//! Notebooks: the code of all cells as one text, since what one cell imports the next ones use.

use serde_json::Value;

/// The code of a notebook.
pub(crate) struct Cells {
    pub(crate) text: String,
    /// Where each cell begins in the text, and its number in the notebook, from 1.
    starts: Vec<(usize, u32)>,
}

impl Cells {
    /// The cell at a byte of the text: its number, and where it begins.
    pub(crate) fn at(&self, byte: usize) -> (u32, usize) {
        let index = self.starts.partition_point(|(start, _)| *start <= byte);
        self.starts.get(index.saturating_sub(1)).map_or((1, 0), |(start, number)| (*number, *start))
    }

    /// Blanks the cell at a byte, so that its neighbours can be read.
    pub(crate) fn blank(&mut self, byte: usize) {
        let (_, start) = self.at(byte);
        let end = self.starts.iter().map(|(s, _)| *s).find(|s| *s > start).unwrap_or(self.text.len());
        let blank: String =
            self.text[start..end].bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect();
        self.text.replace_range(start..end, &blank);
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }
}

/// The code cells of a notebook.
pub(crate) fn cells(json: &str) -> Result<Cells, String> {
    let notebook: Value = serde_json::from_str(json).map_err(|e| e.to_string())?;
    // Version 3 had its cells in worksheets.
    let sheets = notebook.get("worksheets").and_then(|w| w.get(0)).and_then(|w| w.get("cells"));
    let all = notebook.get("cells").or(sheets).and_then(Value::as_array).ok_or("it has no cells")?;
    let mut cells = Cells { text: String::new(), starts: Vec::new() };
    for (i, cell) in all.iter().enumerate() {
        if cell.get("cell_type").and_then(Value::as_str) != Some("code") {
            continue;
        }
        let source = match cell.get("source").or(cell.get("input")) {
            Some(Value::String(s)) => s.clone(),
            Some(Value::Array(lines)) => lines.iter().filter_map(Value::as_str).collect(),
            _ => continue,
        };
        // A cell of another language, or one that a magic takes as a text.
        let python = ["%%time", "%%capture", "%%timeit"].iter().any(|m| source.starts_with(m));
        let other = source.trim_start().starts_with("%%") && !python;
        if other {
            continue;
        }
        cells.starts.push((cells.text.len(), i as u32 + 1));
        // The magic's line alone is no Python; what follows is.
        let source = if python { source.replacen("%%", "# ", 1) } else { source };
        cells.text.push_str(&source);
        cells.text.push('\n');
    }
    Ok(cells)
}
