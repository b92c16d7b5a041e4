//! From captured programs and what the compiler said of them to an answer: does it fit, how fast could it be, what does it
//! cost, what would make it smaller.

pub(crate) mod advice;
pub(crate) mod budget;
mod effort;
pub(crate) mod prices;
pub(crate) mod processes;
mod verdict;

pub use budget::Limit;

pub(crate) use effort::undecided;
pub(crate) use verdict::judge;
