//! The pages of the rules are what the rules say.

use std::fs;
use std::path::Path;

use oxitorch_audit::{families, page};

#[test]
fn each_family_has_its_page() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/audit");
    let mut expected: Vec<String> =
        families().iter().map(|f| format!("{}.md", f.name.replace(' ', "-"))).collect();
    for (family, name) in families().iter().zip(&expected) {
        let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert!(text == page(family), "docs/audit/{name} is old: `cargo xtask pages audit` writes it");
    }
    let mut found: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}
