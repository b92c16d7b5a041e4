//! A release: the version where it stands, the day in the changelog, the lock file, and the wheel.

use crate::{git, root, say, succeed};
use anyhow::{Context, Result, bail, ensure};
use std::process::Command;

pub(crate) fn run(args: &[String]) -> Result<()> {
    let [version] = args else { bail!("usage: cargo xtask release VERSION") };
    let root = root();
    let changes = git(&root, &["status", "--porcelain"])?;
    ensure!(changes.is_empty(), "there are changes that are not committed:\n{changes}");
    let read =
        |file: &str| std::fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"));
    let manifest = with_version(&read("Cargo.toml")?, version)?;
    let day =
        String::from_utf8(Command::new("date").arg("+%F").output().context("cannot run `date`")?.stdout)?;
    let changelog = released(&read("CHANGELOG.md")?, version, day.trim())?;
    std::fs::write(root.join("Cargo.toml"), manifest)?;
    std::fs::write(root.join("CHANGELOG.md"), changelog)?;
    succeed(Command::new("cargo").current_dir(&root).args([
        "update",
        "--quiet",
        "--offline",
        "--workspace",
    ]))?;
    succeed(Command::new("make").current_dir(&root).args(["--silent", "release-wheel", "ARGS=--check"]))?;
    say(&format!(
        "The wheel is in target/release-wheel. What is left:\n  make test\n  git commit -am 'release {version}'\n  git tag v{version}"
    ));
    Ok(())
}

/// The three numbers of a version.
fn numbers(version: &str) -> Result<Vec<u32>> {
    let parsed: Result<Vec<u32>, _> = version.split('.').map(str::parse).collect();
    parsed
        .ok()
        .filter(|n| n.len() == 3)
        .with_context(|| format!("`{version}` is not a version such as 0.2.0"))
}

/// The workspace's manifest with another version, which is no older.
fn with_version(manifest: &str, version: &str) -> Result<String> {
    let line =
        manifest.lines().find(|l| l.starts_with("version = \"")).context("Cargo.toml has no version")?;
    let old = line.split('"').nth(1).unwrap_or_default();
    ensure!(numbers(version)? >= numbers(old)?, "{version} is older than {old}, which Cargo.toml has");
    Ok(manifest.replacen(line, &format!("version = \"{version}\""), 1))
}

/// The changelog with the day of the version.
fn released(changelog: &str, version: &str, day: &str) -> Result<String> {
    let heading = format!("\n## {version} (not released)\n");
    ensure!(changelog.contains(&heading), "CHANGELOG.md has no section `{}`", heading.trim());
    Ok(changelog.replacen(&heading, &format!("\n## {version} ({day})\n"), 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_go_up() {
        let manifest = "[workspace.package]\nversion = \"0.1.9\"\n\n[workspace.dependencies]\na = { version = \"0.1.9\" }\n";
        let new = with_version(manifest, "0.1.10").expect("newer");
        assert_eq!(new, manifest.replacen("0.1.9", "0.1.10", 1));
        assert_eq!(with_version(manifest, "0.1.9").expect("the same"), manifest);
        for bad in ["0.1.8", "0.2", "0.2.0-rc", ""] {
            assert!(with_version(manifest, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_changelog_has_the_day() {
        let text = "# Changes\n\n## 0.2.0 (not released)\n\n- a\n";
        assert_eq!(
            released(text, "0.2.0", "2027-01-02").expect("found"),
            "# Changes\n\n## 0.2.0 (2027-01-02)\n\n- a\n"
        );
        assert!(released(text, "0.3.0", "2027-01-02").is_err());
    }
}
