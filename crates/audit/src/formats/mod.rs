//! Files that are no Python: launchers, configurations, lists of requirements, extensions.
//!
//! Each format takes a text apart into what rules ask for (packages, variables, commands, arguments, settings, lines), and
//! knows no rule.

mod config;
mod cpp;
mod notebook;
mod requirements;
mod shell;

use std::ops::Range;
use std::path::Path;
use std::sync::LazyLock;

use crate::finding::Struck;
use crate::rule::{Rule, When};
use crate::rules::{self, listed};

pub(crate) use notebook::cells;

/// What a file is, by its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Format {
    Python,
    Notebook,
    Shell,
    Yaml,
    Json,
    Dockerfile,
    Requirements,
    Pyproject,
    Cpp,
}

impl Format {
    pub(crate) fn of(path: &Path) -> Option<Format> {
        let name = path.file_name()?.to_str()?;
        let lower = name.to_ascii_lowercase();
        if lower == "dockerfile" || lower.starts_with("dockerfile.") || lower.ends_with(".dockerfile") {
            return Some(Format::Dockerfile);
        }
        if lower == "pyproject.toml" {
            return Some(Format::Pyproject);
        }
        match lower.rsplit_once('.')?.1 {
            "py" | "pyi" | "pyw" => Some(Format::Python),
            "ipynb" => Some(Format::Notebook),
            "sh" | "bash" | "zsh" | "slurm" | "sbatch" => Some(Format::Shell),
            "yaml" | "yml" => Some(Format::Yaml),
            "json" => Some(Format::Json),
            "txt" | "in" if lower.contains("requirements") || lower.contains("constraints") => {
                Some(Format::Requirements)
            }
            "cu" | "cuh" | "cpp" | "cc" | "cxx" | "h" | "hpp" => Some(Format::Cpp),
            _ => None,
        }
    }

    /// What begins a comment.
    pub(crate) fn comment(self) -> &'static str {
        if self == Format::Cpp { "//" } else { "#" }
    }
}

/// What the rules find in a text of a format other than Python and notebooks.
pub(crate) fn audit(format: Format, path: &Path, text: &str) -> Vec<Struck> {
    let mut asked = Asked::default();
    match format {
        Format::Shell => shell::read(text, &mut asked),
        Format::Yaml => config::yaml(path, text, &mut asked),
        Format::Json => config::json(text, &mut asked),
        Format::Dockerfile => shell::dockerfile(text, &mut asked),
        Format::Requirements => requirements::list(text, &mut asked),
        Format::Pyproject => requirements::pyproject(text, &mut asked),
        Format::Cpp => cpp::read(text, &mut asked),
        Format::Python | Format::Notebook => {}
    }
    asked.struck
}

/// The rules that ask for something that is no Python.
static OTHERS: LazyLock<Vec<(&Rule, &When)>> = LazyLock::new(|| {
    let is = |w: &&When| {
        matches!(
            w,
            When::Package(_)
                | When::Variable(_)
                | When::Command(_)
                | When::Argument(_)
                | When::Setting(_)
                | When::Line(_)
        )
    };
    rules::all().flat_map(|r| r.when.iter().filter(is).map(move |w| (r, w))).collect()
});

/// What formats tell of a text, and what rules find in it.
#[derive(Default)]
pub(crate) struct Asked {
    struck: Vec<Struck>,
}

impl Asked {
    fn ask(&mut self, range: Range<usize>, what: &str, is: impl Fn(&When) -> bool) {
        for (rule, when) in OTHERS.iter() {
            let again = || self.struck.iter().rev().take(4).any(|s| s.rule.id == rule.id && s.range == range);
            if is(when) && !again() {
                self.struck.push(Struck {
                    rule,
                    range: range.clone(),
                    what: what.to_owned(),
                    edits: Vec::new(),
                });
            }
        }
    }

    /// A package that is asked for, by its normalised name.
    fn package(&mut self, name: &str, range: Range<usize>) {
        let normal = name.to_ascii_lowercase().replace(['_', '.'], "-");
        self.ask(
            range,
            name,
            |w| matches!(w, When::Package(list) if listed(list, &normal) || listed(list, name)),
        );
    }

    /// An environment variable that is set.
    fn variable(&mut self, name: &str, range: Range<usize>) {
        self.ask(range, name, |w| matches!(w, When::Variable(list) if listed(list, name)));
    }

    /// A program or a module of Python that is run.
    fn command(&mut self, name: &str, range: Range<usize>) {
        self.ask(range, name, |w| matches!(w, When::Command(list) if listed(list, name)));
    }

    /// A word of a command.
    fn argument(&mut self, word: &str, range: Range<usize>) {
        self.ask(range, word, |w| matches!(w, When::Argument(is) if is(word)));
    }

    /// A key with its value; of what is no single word the value is empty.
    fn setting(&mut self, key: &str, value: &str, range: Range<usize>) {
        let what = if value.is_empty() { key.to_owned() } else { format!("{key}: {value}") };
        self.ask(range, &what, |w| matches!(w, When::Setting(is) if is(key, value)));
    }

    /// A line of C or C++ without comments.
    fn line(&mut self, line: &str, range: Range<usize>) {
        self.ask(range, line.trim(), |w| matches!(w, When::Line(is) if is(line)));
    }
}

/// Where a part of a text is in it.
fn range_of(text: &str, part: &str) -> Range<usize> {
    let start = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    start..start + part.len()
}
