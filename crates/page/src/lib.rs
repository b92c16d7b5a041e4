//! Reports as one page of HTML: nothing is loaded, nothing runs, and it can be printed.
//!
//! A [`Page`] is [`Card`]s, answers with figures, and [`Section`]s, which are data: a heading, a sentence, a chart, a table.
//! The templates (`templates/page`) say how those look and escape all text, so who adds a section writes no HTML.
//!
//! This crate does not know what a report is about.

mod chart;

use askama::Template;

use oxitorch_format::short;

pub use askama::Error;
pub use chart::{BarRow, Bars, Dot, Part, Point, Roofline, Stack};

/// What pages look like, as CSS.
pub const STYLE: &str = include_str!("../templates/page/style.css");

/// The page.
#[derive(Default, Template)]
#[template(path = "page/page.html")]
pub struct Page {
    /// The heading.
    pub title: String,
    /// What the report is of.
    pub command: String,
    /// What stands before the cards.
    pub first: Vec<Section>,
    /// The answers.
    pub cards: Vec<Card>,
    /// What stands at the end.
    pub notes: Vec<String>,
}

impl Page {
    /// The HTML.
    ///
    /// # Errors
    ///
    /// If the page cannot be written, which is a defect.
    pub fn html(&self) -> Result<String, Error> {
        self.render()
    }
}

/// An answer, and what is said about it.
#[derive(Default)]
pub struct Card {
    /// Where it is on the page.
    pub anchor: String,
    /// Of what.
    pub name: String,
    /// Beside the name.
    pub place: String,
    /// The colour: `good`, `doubt` or `bad`.
    pub tone: &'static str,
    /// A sign in that colour.
    pub mark: &'static str,
    /// The answer in a sentence.
    pub headline: String,
    /// Why it is not known, or what is in the way.
    pub reason: Option<String>,
    /// Numbers that are shown large.
    pub figures: Vec<Figure>,
    /// What is below.
    pub sections: Vec<Section>,
}

/// A number that is shown large.
pub struct Figure {
    /// What it is.
    pub label: &'static str,
    /// As it is shown.
    pub value: String,
    /// In small letters below.
    pub note: String,
}

/// A part of what is said about a slice.
#[derive(Default)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// What the reader should know about it, in a sentence or two.
    pub lead: String,
    /// A drawing.
    pub chart: Option<Chart>,
    /// A table.
    pub table: Option<Table>,
}

/// What a section can draw.
pub enum Chart {
    /// One bar of parts.
    Stack(Stack),
    /// Points below a roof.
    Roofline(Roofline),
    /// Bars side by side.
    Bars(Bars),
}

/// Rows of cells under a head.
#[derive(Default)]
pub struct Table {
    /// Names of columns.
    pub head: Vec<Cell>,
    /// The rows.
    pub rows: Vec<Vec<Cell>>,
    /// Rows that were left out.
    pub more: usize,
}

/// Rows of a table.
const ROWS: usize = 20;

impl Table {
    /// A table with names of columns; those that end in `#` are of numbers.
    pub fn new(head: &[&str], rows: impl IntoIterator<Item = Vec<Cell>>) -> Table {
        let column = |name: &&str| match name.strip_suffix('#') {
            Some(name) => Cell::number(name),
            None => Cell::text(*name),
        };
        let mut rows: Vec<Vec<Cell>> = rows.into_iter().collect();
        let more = rows.len().saturating_sub(ROWS);
        rows.truncate(ROWS);
        Table { head: head.iter().map(column).collect(), rows, more }
    }
}

/// A cell of a table.
#[derive(Default)]
pub struct Cell {
    /// What stands in it.
    pub text: String,
    /// How it looks.
    pub class: &'static str,
    /// Shown when the pointer rests there.
    pub title: String,
    /// The share of the cell that is filled, in percent.
    pub filled: Option<f64>,
    /// A place on the page.
    pub link: Option<String>,
}

impl Cell {
    /// Text.
    pub fn text(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), ..Cell::default() }
    }

    /// A number, at the right.
    pub fn number(text: impl Into<String>) -> Cell {
        Cell { class: "number", ..Cell::text(text) }
    }

    /// Code.
    pub fn code(text: impl Into<String>) -> Cell {
        Cell { class: "code", ..Cell::text(text) }
    }

    /// Code that stays on its line.
    pub fn fixed(text: impl Into<String>) -> Cell {
        Cell { class: "code line", ..Cell::text(text) }
    }

    /// A Python line: its file's name, with the whole path behind it.
    pub fn line(line: Option<&str>) -> Cell {
        let Some(line) = line else { return Cell { class: "dim", ..Cell::text("not known") } };
        Cell { title: line.to_owned(), ..Cell::fixed(short(line)) }
    }

    /// With a gauge of this share.
    #[must_use]
    pub fn filled(mut self, share: f64) -> Cell {
        self.filled = Some((100.0 * share).clamp(0.0, 100.0));
        self
    }
}
