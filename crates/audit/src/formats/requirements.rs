//! Lists of requirements, and the dependencies of a `pyproject.toml`.

use super::{Asked, range_of};

/// A `requirements.txt`.
pub(super) fn list(text: &str, asked: &mut Asked) {
    for whole in text.lines() {
        let line = whole.find(" #").map_or(whole, |at| &whole[..at]).trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with('-') {
            line.split_whitespace().for_each(|w| asked.argument(w, range_of(text, w)));
            continue;
        }
        package(text, line, asked);
    }
}

/// A requirement such as `torch==2.1.0+cu118; python_version > "3.8"`.
pub(super) fn package(text: &str, requirement: &str, asked: &mut Asked) {
    let end = requirement.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')));
    let name = &requirement[..end.unwrap_or(requirement.len())];
    if name.is_empty() {
        return;
    }
    asked.package(name, range_of(text, name));
    asked.argument(requirement, range_of(text, requirement));
}

/// The dependencies that a `pyproject.toml` has in its tables.
pub(super) fn pyproject(text: &str, asked: &mut Asked) {
    let Ok(table) = text.parse::<toml::Table>() else { return };
    let project = table.get("project");
    let mut lists: Vec<&toml::Value> = project.and_then(|p| p.get("dependencies")).into_iter().collect();
    let groups = [project.and_then(|p| p.get("optional-dependencies")), table.get("dependency-groups")];
    lists.extend(groups.into_iter().flatten().filter_map(|g| g.as_table()).flat_map(|t| t.values()));
    lists.extend(table.get("build-system").and_then(|b| b.get("requires")));
    for requirement in lists.into_iter().filter_map(|l| l.as_array()).flatten().filter_map(|r| r.as_str()) {
        if let Some(at) = text.find(requirement) {
            package(text, &text[at..at + requirement.len()], asked);
        }
    }
    let poetry = table.get("tool").and_then(|t| t.get("poetry")).and_then(|p| p.get("dependencies"));
    for name in poetry.and_then(|d| d.as_table()).into_iter().flat_map(|t| t.keys()) {
        if let Some(at) = text.find(name.as_str()) {
            asked.package(name, at..at + name.len());
        }
    }
}
