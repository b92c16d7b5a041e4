//! What is known of a file before it is walked: which loops train, which functions are a step, what is a module.

use ruff_python_ast::visitor::{self, Visitor};
use ruff_python_ast::{Expr, Operator, Stmt};
use ruff_text_size::{Ranged, TextSize};
use rustc_hash::{FxHashMap, FxHashSet};

/// What a first look at the tree finds.
#[derive(Default)]
pub(crate) struct Facts<'a> {
    /// Loops that a `backward()` or an optimizer's `step()` is directly in, by where they begin.
    pub(crate) training: FxHashSet<TextSize>,
    /// Functions with such a call outside of any loop.
    pub(crate) steps: FxHashSet<TextSize>,
    /// Names on which `backward()` is called.
    pub(crate) losses: FxHashSet<&'a str>,
    /// Classes of this file and the last part of the names of their bases.
    bases: FxHashMap<&'a str, Vec<&'a str>>,
    /// Names that functions of this file are called by within such loops.
    pub(crate) called_in_training: FxHashSet<&'a str>,
}

impl<'a> Facts<'a> {
    pub(crate) fn of(body: &'a [Stmt]) -> Facts<'a> {
        let mut look =
            Look { facts: Facts::default(), open: Vec::new(), loops: FxHashMap::default(), seldom: 0 };
        look.visit_body(body);
        let Look { mut facts, loops, .. } = look;
        for (start, names) in loops {
            if facts.training.contains(&start) {
                facts.called_in_training.extend(names);
            }
        }
        facts
    }

    /// Whether a class of this file descends from a class of such a name.
    pub(crate) fn descends(&self, class: &str, is: fn(&str) -> bool) -> bool {
        let mut seen = FxHashSet::default();
        let mut next = vec![class];
        while let Some(name) = next.pop() {
            let Some(bases) = self.bases.get(name).filter(|_| seen.insert(name)) else { continue };
            if bases.iter().any(|b| is(b)) {
                return true;
            }
            next.extend(bases);
        }
        false
    }
}

/// A loop or function that is open.
enum Open {
    Loop(TextSize),
    Function(TextSize),
}

struct Look<'a> {
    facts: Facts<'a>,
    open: Vec<Open>,
    loops: FxHashMap<TextSize, Vec<&'a str>>,
    /// Tests that are open and hold only now and then.
    seldom: u32,
}

impl<'a> Visitor<'a> for Look<'a> {
    fn visit_stmt(&mut self, stmt: &'a Stmt) {
        let open = match stmt {
            Stmt::For(_) | Stmt::While(_) => Open::Loop(stmt.start()),
            Stmt::FunctionDef(_) => Open::Function(stmt.start()),
            Stmt::ClassDef(class) => {
                self.facts.bases.insert(&class.name, class.bases().iter().filter_map(last).collect());
                return visitor::walk_stmt(self, stmt);
            }
            Stmt::If(tested) if counts(&tested.test) => {
                self.seldom += 1;
                visitor::walk_stmt(self, stmt);
                self.seldom -= 1;
                return;
            }
            _ => return visitor::walk_stmt(self, stmt),
        };
        self.open.push(open);
        visitor::walk_stmt(self, stmt);
        self.open.pop();
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        if let Expr::Call(call) = expr {
            match &*call.func {
                Expr::Attribute(f) if f.attr.as_str() == "backward" => {
                    if let Expr::Name(name) = &*f.value {
                        self.facts.losses.insert(name.id.as_str());
                    }
                    self.train();
                }
                Expr::Attribute(f) if f.attr.as_str() == "step" && steps(&f.value) => self.train(),
                Expr::Name(f) => {
                    if let Some(Open::Loop(at)) = self.open.last().filter(|_| self.seldom == 0) {
                        self.loops.entry(*at).or_default().push(f.id.as_str());
                    }
                }
                _ => {}
            }
        }
        visitor::walk_expr(self, expr);
    }
}

impl Look<'_> {
    fn train(&mut self) {
        match self.open.last() {
            Some(Open::Loop(at)) => self.facts.training.insert(*at),
            Some(Open::Function(at)) => self.facts.steps.insert(*at),
            None => false,
        };
    }
}

/// Whether a value that has `step()` is an optimizer or its scaler, by its name.
fn steps(value: &Expr) -> bool {
    last(value).is_some_and(|name| {
        let name = name.to_ascii_lowercase();
        name.contains("opt") || name.contains("scaler") || name == "engine" || name == "model_engine"
    })
}

/// Whether a test asks for a remainder, as `step % 100 == 0` does.
pub(crate) fn counts(test: &Expr) -> bool {
    match test {
        Expr::BoolOp(op) => op.values.iter().any(counts),
        Expr::Compare(compare) => counts(&compare.left),
        Expr::UnaryOp(op) => counts(&op.operand),
        Expr::BinOp(op) => op.op == Operator::Mod,
        _ => false,
    }
}

/// The last part of a name.
pub(crate) fn last(expr: &Expr) -> Option<&str> {
    match expr {
        Expr::Name(name) => Some(name.id.as_str()),
        Expr::Attribute(attribute) => Some(attribute.attr.as_str()),
        Expr::Subscript(of) => last(&of.value),
        _ => None,
    }
}
