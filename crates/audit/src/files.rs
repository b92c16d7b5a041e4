//! Which files are read.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::formats::Format;

/// Folders that are not the user's code, unless they are named.
const SKIPPED: &[&str] = &[
    "__pycache__",
    "node_modules",
    "venv",
    "env",
    "site-packages",
    "dist-packages",
    "build",
    "dist",
    "third_party",
];

/// The files below the paths that have a format, sorted; those that are named are there whatever their folder.
pub(crate) fn below(paths: &[PathBuf], exclude: &[String]) -> Result<Vec<(PathBuf, Format)>, Error> {
    let mut out = Vec::new();
    for path in paths {
        let meta = fs::metadata(path).map_err(|e| Error::Path(path.clone(), e))?;
        if meta.is_dir() {
            folder(path, path, exclude, &mut out)?;
        } else if let Some(format) = Format::of(path) {
            out.push((path.clone(), format));
        } else {
            return Err(Error::Format(path.clone()));
        }
    }
    out.sort();
    out.dedup();
    Ok(out)
}

fn folder(
    root: &Path,
    path: &Path,
    exclude: &[String],
    out: &mut Vec<(PathBuf, Format)>,
) -> Result<(), Error> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        // What one may not read below a folder that one may is left out.
        Err(_) if root != path => return Ok(()),
        Err(e) => return Err(Error::Path(path.to_owned(), e)),
    };
    for entry in entries.flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let Some(name) = name.to_str() else { continue };
        // Of a link it is not said where it leads: into a circle, for instance.
        let Ok(kind) = entry.file_type() else { continue };
        let inside = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        if is_excluded(&inside, exclude) {
            continue;
        }
        if kind.is_dir() {
            let skipped = name.starts_with('.') || SKIPPED.contains(&name) || name.ends_with(".egg-info");
            if !skipped {
                folder(root, &path, exclude, out)?;
            }
        } else if kind.is_file()
            && let Some(format) = Format::of(&path)
        {
            out.push((path, format));
        }
    }
    Ok(())
}

/// Whether a path below a root is excluded: by its whole, by a folder that it is in, or by the name of a part.
fn is_excluded(path: &str, exclude: &[String]) -> bool {
    exclude.iter().any(|pattern| {
        let pattern = pattern.trim_end_matches('/').trim_start_matches("./");
        let whole =
            matches(pattern, path) || path.strip_prefix(pattern).is_some_and(|rest| rest.starts_with('/'));
        whole || path.split('/').any(|part| matches(pattern, part))
    })
}

/// Whether a pattern with `*` for any text matches.
fn matches(pattern: &str, text: &str) -> bool {
    let (p, t) = (pattern.as_bytes(), text.as_bytes());
    // Where to go on if what follows a `*` does not match: behind it, with one byte more taken by it.
    let (mut i, mut j, mut star) = (0, 0, None);
    while j < t.len() {
        match p.get(i) {
            Some(b'*') => {
                star = Some((i + 1, j));
                i += 1;
            }
            Some(b) if *b == t[j] => (i, j) = (i + 1, j + 1),
            _ => match star {
                Some((after, taken)) => {
                    star = Some((after, taken + 1));
                    (i, j) = (after, taken + 1);
                }
                None => return false,
            },
        }
    }
    p[i..].iter().all(|b| *b == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_take_wholes_folders_and_parts() {
        let excluded = |pattern: &str, path: &str| is_excluded(path, &[pattern.to_owned()]);
        for (pattern, path) in [
            ("tests", "tests/a.py"),
            ("tests", "x/tests/a.py"),
            ("x/tests/", "x/tests/a.py"),
            ("*_pb2.py", "x/a_pb2.py"),
            ("x/*.py", "x/y.py"),
        ] {
            assert!(excluded(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [("tests", "testsuite/a.py"), ("a", "b/aa.py"), ("*.cu", "a.cpp")] {
            assert!(!excluded(pattern, path), "{pattern} {path}");
        }
    }
}
