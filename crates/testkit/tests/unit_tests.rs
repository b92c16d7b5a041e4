//! No unit test stands where nobody runs it.

use std::fs;
use std::path::Path;

#[test]
fn crates_without_a_test_build_have_no_unit_tests() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut without = 0;
    for folder in fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        if manifest.lines().any(|line| line.trim() == "test = false") {
            without += 1;
            look(&folder.join("src"));
        }
    }
    assert!(without > 0, "no crate says so any more: this test has nothing to look at");
}

fn look(folder: &Path) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            look(&path);
        } else {
            let code = fs::read_to_string(&path).unwrap();
            assert!(!code.contains("#[test]"), "{} has tests that are never run", path.display());
        }
    }
}
