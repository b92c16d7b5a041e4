//! The edits that are safe: they change a name and nothing else, so the code means on the device what it meant on a GPU.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use crate::edit::Edit;
use crate::error::Error;
use crate::formats::Format;
use crate::parallel::in_parallel;
use crate::select::Settings;
use crate::{files, one};

/// A file that changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Where it is.
    pub path: PathBuf,
    /// Its text.
    pub before: String,
    /// Its text with the edits.
    pub after: String,
    /// How many edits were made.
    pub edits: usize,
}

impl Changed {
    /// The change as a unified diff with three lines around each.
    pub fn diff(&self) -> String {
        diff(&self.path.to_string_lossy(), &self.before, &self.after)
    }
}

/// What the edits make of the files; `write` says whether they are written too.
///
/// # Errors
///
/// As of `audit`; or if a file cannot be written.
pub fn fix(paths: &[PathBuf], settings: &Settings, write: bool) -> Result<Vec<Changed>, Error> {
    settings.check()?;
    let files = files::below(paths, &settings.exclude)?;
    let changed = in_parallel(&files, |(path, format)| {
        if *format != Format::Python {
            return None;
        }
        // What begins with a mark of the byte order is left as it is.
        let before = fs::read_to_string(path).ok().filter(|t| !t.starts_with('\u{feff}'))?;
        let (after, edits) = mended(&path.to_string_lossy(), &before, settings);
        (edits > 0).then(|| Changed { path: path.clone(), before, after, edits })
    })?;
    let changed: Vec<Changed> = changed.into_iter().flatten().collect();
    if write {
        for file in &changed {
            fs::write(&file.path, &file.after).map_err(|e| Error::Write(file.path.clone(), e))?;
        }
    }
    Ok(changed)
}

/// A text with the edits of its findings, and how many they were.
pub(crate) fn mended(name: &str, text: &str, settings: &Settings) -> (String, usize) {
    let mut edits: Vec<Edit> =
        one::findings(name, text, settings).into_iter().flat_map(|f| f.edits).collect();
    edits.sort_by_key(|e| (e.range.start, e.range.end));
    edits.dedup();
    let (mut out, mut at, mut made) = (String::with_capacity(text.len()), 0, 0);
    for edit in edits {
        // Two rules may want the same word; the first has it.
        if edit.range.start < at || text[edit.range.clone()] == edit.with {
            continue;
        }
        out.push_str(&text[at..edit.range.start]);
        out.push_str(&edit.with);
        at = edit.range.end;
        made += 1;
    }
    out.push_str(&text[at..]);
    (out, made)
}

/// Lines that changed, where both texts have the same lines otherwise, as an edit adds and removes none.
fn diff(path: &str, before: &str, after: &str) -> String {
    const AROUND: usize = 3;
    let (a, b): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
    let mut out = format!("--- {path}\n+++ {path}\n");
    let differs: Vec<usize> = (0..a.len().min(b.len())).filter(|i| a[*i] != b[*i]).collect();
    let mut rest = &differs[..];
    while let Some(first) = rest.first() {
        let mut end = 1;
        while end < rest.len() && rest[end] - rest[end - 1] <= 2 * AROUND {
            end += 1;
        }
        let (hunk, behind) = rest.split_at(end);
        rest = behind;
        let (from, to) = (first.saturating_sub(AROUND), (hunk[hunk.len() - 1] + AROUND + 1).min(a.len()));
        let _ = writeln!(out, "@@ -{0},{1} +{0},{1} @@", from + 1, to - from);
        let mut i = from;
        while i < to {
            if a[i] == b[i] {
                let _ = writeln!(out, " {}", a[i]);
                i += 1;
                continue;
            }
            let until = (i..to).find(|j| a[*j] == b[*j]).unwrap_or(to);
            (i..until).for_each(|j| out.push_str(&format!("-{}\n", a[j])));
            (i..until).for_each(|j| out.push_str(&format!("+{}\n", b[j])));
            i = until;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_changes_a_name_and_nothing_else() {
        let cases = [
            ("x = y.cuda()  # move\n", "x = y.tpu()  # move\n"),
            ("x = y.cuda(0, non_blocking = True)\n", "x = y.tpu(0, non_blocking = True)\n"),
            ("d = torch.device(  'cuda:0' )\n", "d = torch.device(  'tpu:0' )\n"),
            ("d = torch.device(f\"cuda:{i}\")\n", "d = torch.device(f\"tpu:{i}\")\n"),
            (
                "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n",
                "device = 'tpu' if torch.tpu.is_available() else 'cpu'\n",
            ),
            (
                "with torch.cuda.amp.autocast(\n    enabled=on,  # why\n):\n    pass\n",
                "with torch.amp.autocast(\"tpu\", \n    enabled=on,  # why\n):\n    pass\n",
            ),
            ("s = torch.cuda.amp.GradScaler()\n", "s = torch.amp.GradScaler(\"tpu\")\n"),
            (
                "torch.distributed.init_process_group(backend='nccl', rank=r)\n",
                "torch.distributed.init_process_group(backend='cpu:gloo,tpu:tpu', rank=r)\n",
            ),
            ("if x.device.type == 'cuda':\n    pass\n", "if x.device.type == 'cuda':\n    pass\n"),
            (
                "device = 'cuda'\nkind = 'cuda' if 'cuda' in device else 'cpu'\nfused = device == \"cuda\"\n",
                "device = 'tpu'\nkind = 'cuda' if 'tpu' in device else 'cpu'\nfused = device == \"tpu\"\n",
            ),
            ("torch.cuda.nvtx.range_pop()\n", "torch.cuda.nvtx.range_pop()\n"),
        ];
        for (before, after) in cases {
            let (before, after) = (format!("import torch\n{before}"), format!("import torch\n{after}"));
            let (made, _) = mended("a.py", &before, &Settings::default());
            assert_eq!(made, after);
            assert_eq!(mended("a.py", &made, &Settings::default()), (made.clone(), 0), "again");
        }
    }

    #[test]
    fn a_diff_has_three_lines_around() {
        let before: String = (0..20).map(|i| format!("{i}\n")).collect();
        let after = before.replace("\n4\n", "\nfour\n").replace("\n15\n", "\nfifteen\n");
        let expected = "--- a\n+++ a\n@@ -2,7 +2,7 @@\n 1\n 2\n 3\n-4\n+four\n 5\n 6\n 7\n@@ -13,7 +13,7 @@\n 12\n 13\n 14\n-15\n+fifteen\n 16\n 17\n 18\n";
        assert_eq!(diff("a", &before, &after), expected);
    }
}
