//! Which rules are asked: by options, by `pyproject.toml`, by comments.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::error::Error;
use crate::finding::Finding;
use crate::rules;

/// `[tool.oxitorch.audit]` of a `pyproject.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Rules or families; all, if empty.
    pub select: Vec<String>,
    /// Rules or families that are left out.
    pub ignore: Vec<String>,
    /// Paths, folders or names that are not read; `*` stands for any text.
    pub exclude: Vec<String>,
}

impl Settings {
    /// Those of the nearest `pyproject.toml` at or above a path that has them.
    ///
    /// # Errors
    ///
    /// If it is no TOML, or has a setting that there is not.
    pub fn around(path: &Path) -> Result<Settings, Error> {
        let Ok(path) = path.canonicalize() else { return Ok(Settings::default()) };
        for folder in path.ancestors() {
            let file = folder.join("pyproject.toml");
            let Ok(text) = fs::read_to_string(&file) else { continue };
            let table: toml::Table = text
                .parse()
                .map_err(|e: toml::de::Error| Error::Settings(file.clone(), e.message().to_owned()))?;
            let ours = table.get("tool").and_then(|t| t.get("oxitorch")).and_then(|o| o.get("audit"));
            if let Some(ours) = ours {
                let settings: Settings = ours
                    .clone()
                    .try_into()
                    .map_err(|e: toml::de::Error| Error::Settings(file.clone(), e.message().to_owned()))?;
                settings.check()?;
                return Ok(settings);
            }
        }
        Ok(Settings::default())
    }

    /// Whether each name is of a rule or a family.
    ///
    /// # Errors
    ///
    /// Names the first that is not.
    pub fn check(&self) -> Result<(), Error> {
        let known = |name: &&String| rules::all().any(|r| begins(r.id, name));
        match self.select.iter().chain(&self.ignore).find(|n| !known(n)) {
            Some(other) => Err(Error::Rule(other.clone())),
            None => Ok(()),
        }
    }

    /// Whether a rule is asked.
    pub(crate) fn takes(&self, id: &str) -> bool {
        let listed = |list: &[String]| list.iter().filter(|n| begins(id, n)).map(String::len).max();
        // What is said more exactly is stronger: `--select SYN001 --ignore SYN`.
        match (listed(&self.select), listed(&self.ignore)) {
            (Some(selected), Some(ignored)) => selected > ignored,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (None, None) => self.select.is_empty(),
        }
    }
}

/// Whether an id is meant by a name: the whole id, or its beginning. `ALL` means all.
fn begins(id: &str, name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    !name.is_empty() && (id.starts_with(&name) || name == "ALL")
}

/// What comments of a text say to ignore.
#[derive(Default)]
pub(crate) struct Ignored {
    /// Lines, and the rules that are ignored there; none is all.
    lines: Vec<(u32, Vec<String>)>,
    file: Vec<Vec<String>>,
}

impl Ignored {
    pub(crate) fn of(text: &str, comment: &str) -> Ignored {
        const MARK: &str = "oxitorch: ignore";
        let mut ignored = Ignored::default();
        if memchr::memmem::find(text.as_bytes(), MARK.as_bytes()).is_none() {
            return ignored;
        }
        for (i, line) in text.lines().enumerate() {
            let Some(at) = line.find(MARK) else { continue };
            if !line[..at].contains(comment) {
                continue;
            }
            let rest = &line[at + MARK.len()..];
            let (file, rest) = rest.strip_prefix("-file").map_or((false, rest), |r| (true, r));
            let names = rest.strip_prefix('[').and_then(|r| r.split_once(']')).map_or("", |(names, _)| names);
            let names = names.split(',').map(|n| n.trim().to_owned()).filter(|n| !n.is_empty()).collect();
            if file {
                ignored.file.push(names);
            } else {
                ignored.lines.push((i as u32 + 1, names));
            }
        }
        ignored
    }

    /// Whether a finding is ignored; `line` and `end` are of the whole text.
    pub(crate) fn has(&self, finding: &Finding, line: u32, end: u32) -> bool {
        let means = |names: &[String]| names.is_empty() || names.iter().any(|n| begins(finding.rule, n));
        self.file.iter().any(|names| means(names))
            || self.lines.iter().any(|(at, names)| (*at == line || *at == end) && means(names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_more_exactly_is_stronger() {
        let s = |select: &[&str], ignore: &[&str]| Settings {
            select: select.iter().map(|s| s.to_string()).collect(),
            ignore: ignore.iter().map(|s| s.to_string()).collect(),
            exclude: Vec::new(),
        };
        assert!(s(&[], &[]).takes("SYN001") && s(&["syn"], &[]).takes("SYN001"));
        assert!(!s(&["DEV"], &[]).takes("SYN001") && !s(&[], &["SYN"]).takes("SYN001"));
        assert!(s(&["SYN001"], &["SYN"]).takes("SYN001") && !s(&["SYN"], &["SYN001"]).takes("SYN001"));
        assert!(s(&["SYNX"], &[]).check().is_err());
    }
}
