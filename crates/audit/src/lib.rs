//! What of a code base has to change, or will hurt, on TPUs and through XLA.
//!
//! [`audit`] reads files and gives a [`Report`] of [`Finding`]s; [`fix`] makes the edits that are safe. A [`Rule`] is one
//! declaration: its words, its examples, and where it strikes. The layers, from the lowest: `rule` and `finding` (what all
//! speak of), `source` (lines), `python` (the parser's tree with a model of names, values and loops), `formats` (files that
//! are no Python), `rules` (the families; they and the matchers know each other), `select` and `files` (what is read and
//! asked), `text` (one file's findings), `effort`, and `show`.
//!
//! This crate does not know devices, PyTorch or a command line: it is a function of files to findings.

mod effort;
mod files;
mod finding;
mod fixes;
mod formats;
mod one;
mod python;
mod rule;
mod rules;
mod select;
mod show;
mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde::Serialize;

pub use effort::{Estimate, Part};
pub use finding::Finding;
pub use fixes::{Changed, fix};
pub use one::findings;
pub use rule::{Effort, Example, Family, Rule, Runs, Severity};
pub use rules::devices::MIRRORED;
pub use rules::{all as rules, by_id, families, family};
pub use select::Settings;
pub use show::{explain, github, page, sarif, table, text};

use formats::Format;

/// What keeps an audit from being done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path is not there, or may not be read.
    #[error("cannot read `{}`: {}", .0.display(), .1)]
    Path(PathBuf, std::io::Error),
    /// A file cannot be written.
    #[error("cannot write `{}`: {}", .0.display(), .1)]
    Write(PathBuf, std::io::Error),
    /// A file is named that has none of the formats.
    #[error("`{}` is no file that can be audited: Python, a notebook, a shell script, YAML, JSON, a Dockerfile, requirements, C++ or CUDA", .0.display())]
    Format(PathBuf),
    /// The settings in a `pyproject.toml`.
    #[error("`{}`, [tool.oxitorch.audit]: {}", .0.display(), .1)]
    Settings(PathBuf, String),
    /// A name that is of no rule.
    #[error("there is no rule or family `{0}`; `oxitorch audit --rules` lists them")]
    Rule(String),
    /// The system gives no thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// The stack of a thread that reads: enough for a tree of the deepest text that is read (`python/nesting.rs`), and taken
/// from the system as it is used.
const STACK: usize = 256 << 20;

/// Files of more bytes are no source that somebody wrote.
const LARGEST: u64 = 32 << 20;

/// What an audit found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Of this JSON.
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
    let read = in_parallel(&files, |(path, format)| read(path, *format, settings))?;
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
fn read(path: &Path, format: Format, settings: &Settings) -> (usize, Vec<Finding>) {
    let name = path.to_string_lossy().replace('\\', "/");
    let name = name.strip_prefix("./").unwrap_or(&name);
    let large = fs::metadata(path).is_ok_and(|m| m.len() > LARGEST);
    let text = if large { Err("it has more than 32 MiB".to_owned()) } else { utf8(path) };
    match text {
        Ok(text) => {
            let lines = memchr::memchr_iter(b'\n', text.as_bytes()).count();
            (lines, one::of(path, name, format, &text, settings))
        }
        // Of other formats it is no loss.
        Err(why) if matches!(format, Format::Python | Format::Notebook) && settings.takes("REA001") => {
            (0, vec![one::unreadable(name, &why)])
        }
        Err(_) => (0, Vec::new()),
    }
}

fn utf8(path: &Path) -> Result<String, String> {
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    let text = String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// Does something with each item, in as many threads as there are cores; the results are in the items' order.
fn in_parallel<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Result<Vec<R>, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len().max(1));
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let work = || {
                let mut mine = Vec::new();
                while let Some((i, item)) = {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    items.get(i).map(|item| (i, item))
                } {
                    mine.push((i, each(item)));
                }
                done.lock().unwrap_or_else(|e| e.into_inner()).extend(mine);
            };
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work).map_err(Error::Thread)?;
        }
        Ok(())
    })?;
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, r)| r).collect())
}
