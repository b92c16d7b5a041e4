//! Reports for people: text for the terminal, a page of HTML.

mod found;
mod html;
mod notes;
mod sent;
mod text;
mod words;
