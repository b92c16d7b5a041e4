//! What a file knows of others: which of its functions their training loops call, and which packages they are.

use std::path::{Path, PathBuf};

use memchr::memmem;
use ruff_python_ast::Stmt;
use ruff_python_parser::parse_module;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::error::Error;
use crate::formats::Format;
use crate::parallel::in_parallel;
use crate::python::{Elsewhere, Facts, is_shallow};
use crate::source::utf8;

/// What the files that are read tell each other.
#[derive(Default)]
pub(crate) struct Others {
    /// Functions that training loops call, by the last part of the names of their modules.
    called: FxHashMap<String, FxHashSet<String>>,
    /// Packages that are among the files.
    own: FxHashSet<String>,
}

impl Others {
    /// What the training loops of Python files call in other modules, by what they import, and the packages of all.
    pub(crate) fn in_files(files: &[(PathBuf, Format)]) -> Result<Others, Error> {
        let found = in_parallel(files, |(path, format)| match format {
            Format::Python => utf8(path).map(|text| calls(&text)).unwrap_or_default(),
            _ => Vec::new(),
        })?;
        let mut others = Others { own: packages(files), ..Others::default() };
        for (module, function) in found.into_iter().flatten() {
            others.called.entry(module).or_default().insert(function);
        }
        Ok(others)
    }

    /// What is told a file.
    pub(crate) fn of(&self, path: &Path) -> Elsewhere<'_> {
        let module = || match path.file_stem()?.to_str()? {
            "__init__" => path.parent()?.file_name()?.to_str(),
            name => Some(name),
        };
        let called = module().and_then(|m| self.called.get(m));
        Elsewhere { called, own: Some(&self.own), ..Elsewhere::default() }
    }
}

/// The packages that files are of, by their names: folders with an `__init__.py` that are in no other package.
fn packages(files: &[(PathBuf, Format)]) -> FxHashSet<String> {
    let is_init = |p: &&Path| p.file_name().is_some_and(|n| n == "__init__.py");
    let folders: FxHashSet<&Path> =
        files.iter().map(|(p, _)| &**p).filter(is_init).filter_map(Path::parent).collect();
    let top = folders.iter().filter(|f| !f.parent().is_some_and(|p| folders.contains(p)));
    top.filter_map(|f| Some(f.file_name()?.to_str()?.to_owned())).collect()
}

/// Modules and their functions that the training loops of a text call.
fn calls(text: &str) -> Vec<(String, String)> {
    let trains = memmem::find(text.as_bytes(), b".backward(").is_some();
    if !trains || !is_shallow(text) {
        return Vec::new();
    }
    let Ok(module) = parse_module(text) else { return Vec::new() };
    let body = &module.syntax().body;
    let facts = Facts::of(body);
    let mut out = Vec::new();
    for stmt in body {
        match stmt {
            Stmt::ImportFrom(import) => {
                let from = import.module.as_ref().map_or("", |m| m.as_str());
                for alias in &import.names {
                    let (name, here) =
                        (alias.name.as_str(), alias.asname.as_ref().unwrap_or(&alias.name).as_str());
                    if facts.called_in_training.contains(here) {
                        out.push((last(from).to_owned(), name.to_owned()));
                    }
                    members(&facts, here, name, &mut out);
                }
            }
            Stmt::Import(import) => {
                for alias in &import.names {
                    let name = alias.name.as_str();
                    members(&facts, alias.asname.as_ref().map_or(name, |n| n.as_str()), last(name), &mut out);
                }
            }
            _ => {}
        }
    }
    out
}

/// What is called as a member of a module that is named so here.
fn members(facts: &Facts<'_>, here: &str, module: &str, out: &mut Vec<(String, String)>) {
    let of = facts.members_called_in_training.iter().filter(|(of, _)| *of == here);
    out.extend(of.map(|(_, name)| (module.to_owned(), (*name).to_owned())));
}

fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_outermost_folders() {
        let files = ["a/pkg/__init__.py", "a/pkg/ops/__init__.py", "a/pkg/ops/triton/k.py", "a/train.py"];
        let files: Vec<_> = files.iter().map(|f| (PathBuf::from(f), Format::Python)).collect();
        assert_eq!(packages(&files).into_iter().collect::<Vec<_>>(), ["pkg"]);
    }

    #[test]
    fn what_training_loops_call_is_found_by_what_is_imported() {
        let text = "import torch\nimport util.misc as misc\nfrom .losses import total as loss_of, other\nfrom . import engine\n
for x in loader:\n    loss = loss_of(x)\n    loss.backward()\n    misc.log(loss)\n    engine.show(loss)\n    if i % 10 == 0:\n        other(x)\n";
        let mut found = calls(text);
        found.sort();
        let expected = [("engine", "show"), ("losses", "total"), ("misc", "log")];
        assert_eq!(found, expected.map(|(m, f)| (m.to_owned(), f.to_owned())));
        assert!(calls(&text.replace("loss.backward()", "pass")).is_empty());
    }
}
