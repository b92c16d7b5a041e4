//! Installed Python packages, read from their `.dist-info` folders.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The packages on an import path, by normalised name. Of two with the same name the first on the path counts, as it
/// does for `import`.
#[derive(Debug, Default)]
pub(crate) struct Packages(BTreeMap<String, Package>);

/// An installed package.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Package {
    /// Its name, lower case with dashes.
    pub(crate) name: String,
    pub(crate) version: String,
    folder: PathBuf,
}

impl Packages {
    /// Looks through the folders of an import path.
    pub(crate) fn scan(site_dirs: &[PathBuf]) -> Packages {
        let mut found = BTreeMap::new();
        for dir in site_dirs {
            let Ok(entries) = fs::read_dir(dir) else { continue };
            for entry in entries.flatten() {
                if let Some(p) = Package::from_dist_info(&entry.path()) {
                    found.entry(p.name.clone()).or_insert(p);
                }
            }
        }
        Packages(found)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Package> {
        self.0.get(&normalise(name))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Package> {
        self.0.values()
    }
}

impl Package {
    fn from_dist_info(folder: &Path) -> Option<Package> {
        let (name, version) = folder.file_name()?.to_str()?.strip_suffix(".dist-info")?.split_once('-')?;
        Some(Package { name: normalise(name), version: version.into(), folder: folder.into() })
    }

    /// The names that the package registers under an entry point group.
    pub(crate) fn entry_points(&self, group: &str) -> Vec<String> {
        let text = fs::read_to_string(self.folder.join("entry_points.txt")).unwrap_or_default();
        let mut inside = false;
        let mut names = Vec::new();
        for line in text.lines().map(str::trim) {
            if let Some(section) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                inside = section.trim() == group;
            } else if let (true, Some((name, _))) = (inside, line.split_once('=')) {
                names.push(name.trim().to_string());
            }
        }
        names
    }

    /// The requirements on `dependency`, for instance `==0.0.40.*` from `libtpu==0.0.40.*; extra == 'tpu'`.
    pub(crate) fn requires(&self, dependency: &str) -> Vec<String> {
        let text = fs::read_to_string(self.folder.join("METADATA")).unwrap_or_default();
        let header = text.split("\n\n").next().unwrap_or_default();
        let lines = header.lines().filter_map(|l| l.strip_prefix("Requires-Dist:"));
        lines.filter_map(|l| requirement(l.trim(), dependency)).collect()
    }
}

/// The version part of a requirement on `dependency`.
fn requirement(line: &str, dependency: &str) -> Option<String> {
    let line = line.split(';').next()?.trim();
    let end = line.find(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c))).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let rest = rest.trim().trim_start_matches('(').trim_end_matches(')').trim();
    (normalise(name) == normalise(dependency)).then(|| rest.replace(' ', ""))
}

/// "Torch_TPU" -> "torch-tpu".
fn normalise(name: &str) -> String {
    name.to_ascii_lowercase().replace(['_', '.'], "-")
}

/// The leading numbers of a version: "2.15.0+cu132" -> [2, 15, 0].
pub(crate) fn release(version: &str) -> Vec<u32> {
    let digits = version.split(['+', '-']).next().unwrap_or_default().split('.');
    digits.map_while(|part| part.parse().ok()).collect()
}

/// Whether `version` meets a list of comparisons, as far as plain release numbers go; unknown forms count as met.
pub(crate) fn meets(version: &str, requirement: &str) -> bool {
    requirement.split(',').filter(|r| !r.is_empty()).all(|r| {
        let split = r.find(|c: char| c.is_ascii_digit()).unwrap_or(r.len());
        let (op, wanted) = r.split_at(split);
        let (have, want) = (release(version), release(wanted));
        match op {
            "==" if wanted.ends_with(".*") => have.starts_with(&want),
            "==" => have == want,
            "!=" => have != want,
            ">=" => have >= want,
            "<=" => have <= want,
            ">" => have > want,
            "<" => have < want,
            _ => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_dist_info() {
        let first = tempfile::tempdir().unwrap();
        let second = tempfile::tempdir().unwrap();
        let info = first.path().join("Torch_TPU-0.2.0.dist-info");
        fs::create_dir(&info).unwrap();
        fs::write(
            info.join("entry_points.txt"),
            "[console_scripts]\na = b:c\n[torch.backends]\ntpu = torch_tpu:_autoload\n",
        )
        .unwrap();
        fs::write(
            info.join("METADATA"),
            "Name: torch-tpu\nRequires-Dist: libtpu==0.0.40.*; extra == 'tpu'\nRequires-Dist: numpy (>=1.2)\n\nRequires-Dist: no\n",
        )
        .unwrap();
        fs::create_dir(second.path().join("torch_tpu-0.1.0.dist-info")).unwrap();
        fs::create_dir(second.path().join("numpy")).unwrap();
        let packages = Packages::scan(&[first.path().into(), "/nonexistent".into(), second.path().into()]);
        let found = packages.get("torch_tpu").unwrap();
        assert_eq!((found.name.as_str(), found.version.as_str()), ("torch-tpu", "0.2.0"));
        assert_eq!(found.entry_points("torch.backends"), ["tpu"]);
        assert_eq!(found.requires("libtpu"), ["==0.0.40.*"]);
        assert_eq!(found.requires("numpy"), [">=1.2"]);
        assert!(packages.get("numpy").is_none());
    }

    #[test]
    fn comparisons() {
        let check = |version, requirement, expected| {
            assert_eq!(meets(version, requirement), expected, "{version} {requirement}")
        };
        check("0.0.40.1", "==0.0.40.*", true);
        check("0.0.41", "==0.0.40.*", false);
        check("2.15.0+cu132", ">=2.11,<2.16", true);
        check("2.16.0", ">=2.11,<2.16", false);
        check("2.9.0", ">=2.11,<2.16", false);
        check("1.0", "~=0.9", true);
    }
}
