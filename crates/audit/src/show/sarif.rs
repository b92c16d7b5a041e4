//! Findings as SARIF 2.1.0, which code scanners and editors read.

use serde_json::{Value, json};

use crate::report::Report;
use crate::rule::Rule;
use crate::rule::Severity;
use crate::rules::{all as rules, family};

/// One run with all rules and all findings.
pub fn sarif(report: &Report) -> Value {
    let all: Vec<&Rule> = rules().collect();
    let place = |id: &str| all.iter().position(|r| r.id == id);
    let results: Vec<Value> = report
        .findings
        .iter()
        .map(|f| {
            json!({
                "ruleId": f.rule,
                "ruleIndex": place(f.rule),
                "level": level(f.severity),
                "message": { "text": format!("{} {}", f.message, f.fix) },
                "locations": [{
                    "physicalLocation": {
                        "artifactLocation": { "uri": uri(&f.path) },
                        "region": {
                            "startLine": f.line,
                            "startColumn": f.column,
                            "endLine": f.end_line,
                            "endColumn": f.end_column.max(f.column),
                        }
                    }
                }],
                "properties": { "unchanged": f.unchanged, "fixable": f.fixable, "cell": f.cell },
            })
        })
        .collect();
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "oxitorch audit",
                "version": report.oxitorch,
                "informationUri": env!("CARGO_PKG_REPOSITORY"),
                "rules": all.iter().map(|r| descriptor(r)).collect::<Vec<_>>(),
            }},
            "columnKind": "unicodeCodePoints",
            "results": results,
        }]
    })
}

fn descriptor(rule: &Rule) -> Value {
    json!({
        "id": rule.id,
        "name": rule.name,
        "shortDescription": { "text": rule.sentence.replace("{}", "this") },
        "fullDescription": { "text": rule.explanation },
        "help": { "text": rule.fix },
        "defaultConfiguration": { "level": level(rule.severity) },
        "properties": { "tags": [family(rule).name] },
    })
}

fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Note => "note",
    }
}

/// A path as a part of a URI.
fn uri(path: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || b"/-._~".contains(&b);
    path.bytes().map(|b| if keep(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
}
