//! An audit: the files, and all that was found in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use crate::across::Others;
use crate::effort::{self, Estimate};
use crate::error::Error;
use crate::finding::Finding;
use crate::formats::Format;
use crate::parallel::in_parallel;
use crate::rule::Severity;
use crate::select::Settings;
use crate::source::utf8;
use crate::{files, one};

/// Files of more bytes are no source that somebody wrote.
const LARGEST: u64 = 16 << 20;

/// What an audit found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Of this JSON's form.
    pub version: u32,
    /// The version of oxitorch.
    pub oxitorch: &'static str,
    /// How many were read.
    pub files: usize,
    /// In all files.
    pub lines: usize,
    /// How long it took.
    pub elapsed_s: f64,
    /// How long the changes take.
    pub estimate: Estimate,
    /// By path, line and column.
    pub findings: Vec<Finding>,
}

impl Report {
    /// How many findings have a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|f| f.severity == severity).count()
    }
}

/// Reads all files at and below the paths.
///
/// # Errors
///
/// If a path is not there, or a setting names a rule that is not there. What is wrong within a file is a finding.
pub fn audit(paths: &[PathBuf], settings: &Settings) -> Result<Report, Error> {
    settings.check()?;
    let start = Instant::now();
    let files = files::below(paths, &settings.exclude)?;
    let others = Others::in_files(&files)?;
    let read = in_parallel(&files, |(path, format)| read(path, *format, settings, &others))?;
    let lines = read.iter().map(|r| r.0).sum();
    let findings: Vec<Finding> = read.into_iter().flat_map(|r| r.1).collect();
    Ok(Report {
        version: 1,
        oxitorch: env!("CARGO_PKG_VERSION"),
        files: files.len(),
        lines,
        elapsed_s: start.elapsed().as_secs_f64(),
        estimate: effort::estimate(&findings),
        findings,
    })
}

/// A file's lines and findings.
fn read(path: &Path, format: Format, settings: &Settings, others: &Others) -> (usize, Vec<Finding>) {
    let name = path.to_string_lossy().replace('\\', "/");
    let name = name.strip_prefix("./").unwrap_or(&name);
    let large = fs::metadata(path).is_ok_and(|m| m.len() > LARGEST);
    let text = if large { Err("it has more than 16 MiB".to_owned()) } else { utf8(path) };
    match text {
        Ok(text) => {
            let lines = memchr::memchr_iter(b'\n', text.as_bytes()).count();
            (lines, one::of(path, name, format, &text, settings, others.of(path)))
        }
        // Of other formats it is no loss.
        Err(why) if matches!(format, Format::Python | Format::Notebook) && settings.takes("REA001") => {
            (0, vec![one::unreadable(name, &why)])
        }
        Err(_) => (0, Vec::new()),
    }
}
