//! The report as one page of HTML, in the looks of preflight's.

use oxitorch_format::{duration, many};
use oxitorch_page::{BarRow, Bars, Card, Cell, Chart, Figure, Page, Section, Table};

use crate::effort::{HOW, Part};
use crate::finding::Finding;
use crate::report::Report;
use crate::rule::{Rule, Severity};
use crate::rules::families;

impl Report {
    /// As one page of HTML.
    ///
    /// # Errors
    ///
    /// If the page cannot be written, which is a defect.
    pub fn html(&self) -> Result<String, oxitorch_page::Error> {
        let mut cards = vec![self.sum()];
        cards.extend(families().iter().filter_map(|family| {
            let of: Vec<Section> = family.rules.iter().filter_map(|r| self.section(r)).collect();
            let part = self.estimate.families.iter().find(|p| p.family == family.name)?;
            Some(Card {
                anchor: family.name.replace(' ', "-"),
                name: family.name.to_owned(),
                tone: if part.errors > 0 { "bad" } else { "doubt" },
                mark: if part.errors > 0 { "\u{2717}" } else { "!" },
                headline: plain(family.about),
                sections: of,
                ..Card::default()
            })
        }));
        let notes = vec![
            HOW.to_owned(),
            format!(
                "{} and {} were read in {}; nothing was run.",
                many(self.files as u64, "file"),
                many(self.lines as u64, "line"),
                duration(std::time::Duration::from_secs_f64(self.elapsed_s))
            ),
            format!("oxitorch {}", self.oxitorch),
        ];
        let title = "What a move to TPUs takes".to_owned();
        let command = "oxitorch audit".to_owned();
        Page { title, command, first: Vec::new(), cards, notes }.html()
    }

    fn sum(&self) -> Card {
        let [errors, warnings, notes] =
            [Severity::Error, Severity::Warning, Severity::Note].map(|s| self.count(s));
        let unchanged = self.findings.iter().filter(|f| f.unchanged).count();
        let fixable = self.findings.iter().filter(|f| f.fixable).count();
        let figure = |label, value: String, note: &str| Figure { label, value, note: note.to_owned() };
        let figures = vec![
            figure("has to be changed", errors.to_string(), &format!("of which --fix does {fixable}")),
            figure("runs unchanged", unchanged.to_string(), &format!("{warnings} warnings, {notes} notes")),
            figure("days needed", format!("{:.1}", self.estimate.needed_days), "for what has to be changed"),
            figure("days advised", format!("{:.1}", self.estimate.advised_days), "for what costs time"),
        ];
        Card {
            anchor: "sum".to_owned(),
            name: "All families".to_owned(),
            tone: if errors > 0 { "bad" } else { "good" },
            mark: if errors > 0 { "\u{2717}" } else { "\u{2713}" },
            headline: match errors {
                0 => "It runs as it is.".to_owned(),
                n => format!(
                    "{} to be changed before it runs.",
                    many(n as u64, "line").replacen("lines", "lines have", 1).replacen(
                        "line ",
                        "line has ",
                        1
                    )
                ),
            },
            figures,
            sections: vec![self.families()],
            ..Card::default()
        }
    }

    fn families(&self) -> Section {
        let most =
            self.estimate.families.iter().map(|p| p.needed_days.max(p.advised_days)).fold(0.0, f64::max);
        // The rest is for the words behind a bar, on narrow screens too.
        let share = |x: f64| if most > 0.0 { 40.0 * x / most } else { 0.0 };
        let row = |p: &Part| BarRow {
            label: p.family.to_owned(),
            bars: [("c1", p.needed_days, p.errors, "error"), ("c3", p.advised_days, p.warnings, "warning")]
                .into_iter()
                .filter(|(_, _, found, _)| *found > 0)
                .map(|(color, days, found, what)| {
                    (color, share(days), format!("{days:.1} days, {}", many(found as u64, what)))
                })
                .collect(),
        };
        let bars = Bars {
            legend: vec![("needed", "c1"), ("advised", "c3")],
            rows: self.estimate.families.iter().map(row).filter(|r| !r.bars.is_empty()).collect(),
        };
        let title = "Effort by family".to_owned();
        Section { title, chart: Some(Chart::Bars(bars)), ..Section::default() }
    }

    fn section(&self, rule: &Rule) -> Option<Section> {
        let found: Vec<&Finding> = self.findings.iter().filter(|f| f.rule == rule.id).collect();
        if found.is_empty() {
            return None;
        }
        let rows = found.iter().map(|f| {
            let cell = f.cell.map_or(String::new(), |c| format!(" cell {c}"));
            let place = format!("{}:{}{cell}", f.path, f.line);
            vec![
                Cell { title: f.message.clone(), ..Cell::line(Some(&place)) },
                Cell::code(f.source.trim()),
                Cell::text(if f.fixable { "--fix" } else { "" }),
            ]
        });
        let runs = if rule.unchanged() { "It runs unchanged." } else { "It has to be changed." };
        Some(Section {
            title: format!("{} {}: {}", rule.id, rule.name, many(found.len() as u64, "finding")),
            lead: plain(&format!("{} {} {runs}", rule.sentence.replace("{}", "This"), rule.fix)),
            table: Some(Table::new(&["line", "source", ""], rows)),
            ..Section::default()
        })
    }
}

/// A text without the marks of code, which the page does not set.
fn plain(text: &str) -> String {
    text.replace('`', "")
}
