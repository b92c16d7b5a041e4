//! The walk: once over the tree of a file, with the model, asking the rules that could strike.

mod table;

use std::sync::LazyLock;

use ruff_python_ast::visitor::{self, Visitor};
use ruff_python_ast::{
    Expr, ExprAttribute, ExprCall, ExprCompare, ExprIf, Stmt, StmtAnnAssign, StmtClassDef, StmtFor,
    StmtFunctionDef, UnaryOp,
};
use ruff_python_parser::{Mode, ParseOptions, parse_unchecked};
use ruff_text_size::Ranged;
use rustc_hash::FxHashSet;

use crate::finding::Struck;
use crate::python::{
    Around, Binding, Call, Compared, Elsewhere, Facts, Hit, Kind, Model, Scope, Within, assigned_again,
    bytes, is_over_batches, is_shallow, last, of_kind, text as literal,
};
use crate::rule::{Rule, When};
use crate::rules;
use table::{Entry, TABLE, Table};

/// A text that is no Python: where, and why.
pub(crate) struct Unreadable {
    pub(crate) at: usize,
    pub(crate) why: String,
}

/// Words without one of which no rule strikes in Python.
const WORDS: &[&str] = &[
    "torch",
    "cuda",
    "CUDA",
    "nccl",
    "NCCL",
    "nvidia",
    "pynvml",
    "deepspeed",
    "megatron",
    "horovod",
    "apex",
    "triton",
    "xformers",
    "flash_attn",
    "bitsandbytes",
    "lightning",
    "accelerate",
    "transformers",
    "cupy",
    "cudf",
    "tensorrt",
];

static FINDERS: LazyLock<Vec<memchr::memmem::Finder<'static>>> =
    LazyLock::new(|| WORDS.iter().map(memchr::memmem::Finder::new).collect());

/// What the rules find in a Python text; `notebook` allows `%magic` and `!shell`.
pub(crate) fn audit(text: &str, notebook: bool, elsewhere: Elsewhere<'_>) -> Result<Vec<Struck>, Unreadable> {
    if !is_shallow(text) {
        return Err(Unreadable { at: 0, why: "it nests too deeply".to_owned() });
    }
    let mode = if notebook { Mode::Ipython } else { Mode::Module };
    let parsed = parse_unchecked(text, ParseOptions::from(mode));
    if let Some(error) = parsed.errors().first() {
        return Err(Unreadable { at: error.location.start().to_usize(), why: error.error.to_string() });
    }
    let Some(module) = parsed.syntax().as_module() else { return Ok(Vec::new()) };
    if !FINDERS.iter().any(|f| f.find(text.as_bytes()).is_some()) && !imports_named(&module.body) {
        return Ok(Vec::new());
    }
    let mut facts = Facts::of(&module.body);
    facts.called_in_training.extend(elsewhere.called.into_iter().flatten().map(String::as_str));
    let trains = !facts.training.is_empty() || !facts.steps.is_empty();
    let model = Model {
        text,
        facts,
        scopes: vec![Scope::default()],
        within: Vec::new(),
        torch: false,
        trains,
        device_slot: false,
        compared: Compared::No,
        around: Around::If,
        for_kernels: false,
        roots: FxHashSet::default(),
        tests: Vec::new(),
        elements: Vec::new(),
        elsewhere,
    };
    let mut walk = Walk { model, table: &TABLE, struck: Vec::new() };
    for stmt in &module.body {
        walk.model.bind_imports(stmt);
    }
    walk.visit_body(&module.body);
    Ok(walk.struck)
}

/// Whether a package is imported that a rule names.
fn imports_named(body: &[Stmt]) -> bool {
    let named = |name: &str| {
        let first = name.split('.').next().unwrap_or(name);
        let begins = |n: &&str| n.split('.').next() == Some(first);
        TABLE.below.keys().chain(TABLE.names.keys()).any(begins)
    };
    body.iter().any(|stmt| match stmt {
        Stmt::Import(import) => import.names.iter().any(|a| named(a.name.as_str())),
        Stmt::ImportFrom(import) => import.module.as_ref().is_some_and(|m| named(m.as_str())),
        Stmt::Try(tried) => imports_named(&tried.body),
        _ => false,
    })
}

/// Whether a rule names a module with all that is below it, or one around it.
fn names_whole(rule: &Rule, module: &str) -> bool {
    let within = |name: &&str| {
        let rest = name.strip_suffix(".*").and_then(|whole| module.strip_prefix(whole));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    rule.when.iter().any(|w| matches!(w, When::Name(names) if names.iter().any(&within)))
}

/// What is said in code that builds or takes kernels of CUDA.
const KERNELS: &[&str] = &[
    "CUDAExtension",
    "cpp_extension",
    ".cu\"",
    ".cu'",
    "with_cuda",
    "WITH_CUDA",
    "cupy",
    "flash_attn",
    "apex",
];

/// Characters that are kept of what a rule struck at.
const SHOWN: usize = 200;

struct Walk<'a> {
    model: Model<'a>,
    table: &'static Table,
    struck: Vec<Struck>,
}

impl<'a> Walk<'a> {
    fn strike(&mut self, rule: &'static Rule, hit: Hit) {
        let range = bytes(hit.range);
        // What is shown of it is short, and it may be as long as the file.
        let mut what = if hit.what.is_empty() { self.model.source(hit.range) } else { &hit.what };
        if let Some((end, _)) = what.char_indices().nth(SHOWN) {
            what = &what[..end];
        }
        let what = what.to_owned();
        self.struck.push(Struck { rule, range, what, edits: hit.edits });
    }

    /// The rules for a qualified name, but those that struck already where `root` was imported.
    fn named(&mut self, path: &str, root: Option<&str>, node: &impl Ranged) {
        let table = self.table;
        let matching = |path: &str| -> Vec<Entry> {
            let mut found: Vec<Entry> = table.names.get(path).into_iter().flatten().copied().collect();
            let ends = path.match_indices('.').map(|(i, _)| i).chain([path.len()]);
            found.extend(ends.filter_map(|end| table.below.get(&path[..end])).flatten().copied());
            found
        };
        let found = matching(path);
        // A package that is read itself is no other one's.
        if found.is_empty() || self.model.elsewhere.has(path) {
            return;
        }
        let before = root.map(matching).unwrap_or_default();
        for (rule, _) in found {
            if before.iter().any(|(r, _)| std::ptr::eq(*r, rule)) || (rule.unless)(&self.model) {
                continue;
            }
            let hit = Hit::at(node).named(path);
            let hit = rules::devices::renamed(path, node.range(), self.model.source(node.range()), hit);
            self.strike(rule, hit);
        }
    }

    fn imports(&mut self, stmt: &'a Stmt) {
        self.model.bind_imports(stmt);
        match stmt {
            Stmt::Import(import) => {
                for alias in &import.names {
                    self.named(alias.name.as_str(), None, alias);
                }
            }
            Stmt::ImportFrom(import) if import.level == 0 => {
                let module = import.module.as_ref().map_or("", |m| m.as_str());
                // A module that is meant whole is reported once.
                for alias in &import.names {
                    let path = format!("{module}.{}", alias.name.as_str());
                    let before = self.struck.len();
                    self.named(&path, None, alias);
                    let whole = self.struck[before..].iter().any(|s| names_whole(s.rule, module));
                    if whole {
                        break;
                    }
                }
            }
            _ => {}
        }
    }

    fn truth(&mut self, expr: &'a Expr) {
        match expr {
            Expr::BoolOp(op) => op.values.iter().for_each(|v| self.truth(v)),
            Expr::UnaryOp(op) if op.op == UnaryOp::Not => self.truth(&op.operand),
            _ => {
                for (rule, when) in &self.table.truths {
                    if let When::Truth(find) = when
                        && let Some(hit) = find(expr, &self.model)
                    {
                        self.strike(rule, hit);
                    }
                }
            }
        }
    }

    fn asked(&mut self, around: Around, test: &'a Expr) {
        self.model.around = around;
        self.truth(test);
        self.model.around = Around::If;
    }

    fn inside(&mut self, within: Within<'a>, body: &'a [Stmt]) {
        self.model.within.push(within);
        self.visit_body(body);
        self.model.within.pop();
    }

    fn for_loop(&mut self, stmt: &'a StmtFor) {
        self.visit_expr(&stmt.iter);
        self.model.assign_each(&stmt.target, &stmt.iter);
        self.visit_expr(&stmt.target);
        let over_batches = is_over_batches(&stmt.iter) || {
            let of = |e: &Expr| self.model.kind(e) == Kind::Loader;
            of(&stmt.iter) || matches!(&*stmt.iter, Expr::Call(c) if c.arguments.args.first().is_some_and(of))
        };
        // A body that ends by leaving the loop runs once.
        let once = matches!(stmt.body.last(), Some(Stmt::Return(_) | Stmt::Break(_)));
        let trains = !once
            && ((over_batches && self.model.torch) || self.model.facts.training.contains(&stmt.start()));
        self.inside(Within::Loop { trains, again: assigned_again(&stmt.body) }, &stmt.body);
        self.visit_body(&stmt.orelse);
    }

    fn function(&mut self, f: &'a StmtFunctionDef) {
        f.decorator_list.iter().for_each(|d| self.visit_decorator(d));
        for p in f.parameters.iter_non_variadic_params() {
            p.parameter.annotation.iter().for_each(|a| self.visit_expr(a));
            let device = p.name().as_str().contains("device");
            self.in_slot(device, |w| p.default.iter().for_each(|d| w.visit_expr(d)));
        }
        let name = f.name.as_str();
        let (method, dataset, special) = match self.model.within.last() {
            Some(Within::Class { dataset, function }) => (true, *dataset, *function),
            _ => (false, false, false),
        };
        let forward = method && !special && self.model.torch && name == "forward";
        let test = self.model.elsewhere.is_test || name.starts_with("test");
        let step = (self.model.facts.steps.contains(&f.start()) && !test)
            || (method && matches!(name, "training_step" | "compute_loss"))
            || self.model.facts.called_in_training.contains(name);
        let item = (dataset && matches!(name, "__getitem__" | "__iter__" | "__getitems__"))
            || name.contains("collate");
        let mut scope = Scope::default();
        for p in f.parameters.iter_non_variadic_params() {
            let annotation = p.parameter.annotation.as_deref();
            let kind = match annotation.map(|a| self.model.annotated(a)) {
                Some(kind) => kind,
                None if forward && p.name().as_str() != "self" => Kind::Maybe,
                None => Kind::Unknown,
            };
            // What is a number or a flag by its default is no tensor.
            let kind = if p
                .default
                .as_deref()
                .is_some_and(|d| matches!(self.model.kind(d), Kind::Host) && !d.is_none_literal_expr())
            {
                Kind::Host
            } else {
                kind
            };
            scope.names.insert(p.name().as_str(), Binding { once: false, ..of_kind(kind) });
        }
        self.model.bind(name, of_kind(Kind::Named));
        self.model.scopes.push(scope);
        self.inside(Within::Function { forward, step, item, at: f.start() }, &f.body);
        self.model.scopes.pop();
    }

    fn class(&mut self, class: &'a StmtClassDef) {
        class.decorator_list.iter().for_each(|d| self.visit_decorator(d));
        class.arguments.iter().for_each(|a| self.visit_arguments(a));
        let name = class.name.as_str();
        let dataset = self.model.facts.descends(name, |b| b.ends_with("Dataset"));
        let function = self.model.facts.descends(name, |b| b == "Function");
        self.model.bind(name, of_kind(Kind::Named));
        self.model.scopes.push(Scope { is_class: true, ..Scope::default() });
        self.model.within.push(Within::Class { dataset, function });
        // `__init__` first, wherever it stands, since it says what the members are.
        let is_init = |s: &&Stmt| matches!(s, Stmt::FunctionDef(f) if f.name.as_str() == "__init__");
        class.body.iter().filter(is_init).for_each(|s| self.visit_stmt(s));
        class.body.iter().filter(|s| !is_init(s)).for_each(|s| self.visit_stmt(s));
        self.model.within.pop();
        self.model.scopes.pop();
    }

    fn call(&mut self, call: &'a ExprCall) {
        let path = self.model.path(&call.func);
        let bare = match &*call.func {
            Expr::Name(name) if self.model.binding(name.id.as_str()).is_none() => Some(name.id.as_str()),
            _ => None,
        };
        let path = path.as_deref().or(bare).unwrap_or_default();
        let mut found: Vec<(&'static Rule, Hit)> = Vec::new();
        let seen = Call { call, model: &self.model, path };
        for (rule, when) in self.table.calls.get(path).into_iter().flatten() {
            if let When::Call(_, find) = when {
                found.extend(find(&seen).map(|h| (*rule, h)));
            }
        }
        if let Expr::Attribute(f) = &*call.func {
            for (rule, when) in self.table.methods.get(f.attr.as_str()).into_iter().flatten() {
                if let When::Method(_, find) = when {
                    found.extend(find(&seen).map(|h| (*rule, h)));
                }
            }
        }
        for keyword in &call.arguments.keywords {
            let Some(name) = &keyword.arg else { continue };
            for (rule, when) in self.table.keywords.get(name.as_str()).into_iter().flatten() {
                if let When::Keyword(_, find) = when {
                    found.extend(find(&keyword.value, &seen).map(|h| (*rule, h)));
                }
            }
        }
        for (rule, hit) in found {
            self.strike(rule, hit);
        }
    }

    fn string(&mut self, expr: &'a Expr, text: &str) {
        for (rule, when) in &self.table.texts {
            if let When::Text(find) = when
                && let Some(hit) = find(text, expr, &self.model)
            {
                self.strike(rule, hit);
            }
        }
        for (rule, when) in &self.table.variables {
            let When::Variable(names) = when else { continue };
            if crate::rules::listed(names, text) {
                self.strike(rule, Hit::at(expr).named(text));
            }
        }
    }
}

impl<'a> Visitor<'a> for Walk<'a> {
    fn visit_stmt(&mut self, stmt: &'a Stmt) {
        for (rule, when) in &self.table.statements {
            if let When::Statement(find) = when
                && let Some(hit) = find(stmt, &self.model)
            {
                self.strike(rule, hit);
            }
        }
        match stmt {
            Stmt::Import(_) | Stmt::ImportFrom(_) => self.imports(stmt),
            Stmt::Assign(assign) => {
                let device = assign.targets.iter().any(is_device_name);
                self.in_slot(device, |w| w.visit_expr(&assign.value));
                let kind = self.model.kind(&assign.value);
                for target in &assign.targets {
                    self.visit_expr(target);
                    self.model.assign(target, Some(&assign.value), kind);
                }
            }
            Stmt::AnnAssign(assign) => self.annotated(assign),
            Stmt::AugAssign(assign) => {
                self.visit_expr(&assign.value);
                self.visit_expr(&assign.target);
                let (before, value) = (self.model.kind(&assign.target), self.model.kind(&assign.value));
                let kind = if value == Kind::Tensor { value } else { before };
                self.model.assign(&assign.target, None, kind);
            }
            Stmt::For(stmt) => self.for_loop(stmt),
            Stmt::While(stmt) => {
                self.asked(Around::While, &stmt.test);
                self.visit_expr(&stmt.test);
                let trains = self.model.facts.training.contains(&stmt.start());
                self.inside(Within::Loop { trains, again: assigned_again(&stmt.body) }, &stmt.body);
                self.visit_body(&stmt.orelse);
            }
            Stmt::If(stmt) => {
                self.branch(&stmt.test, &stmt.body);
                for clause in &stmt.elif_else_clauses {
                    match &clause.test {
                        Some(test) => self.branch(test, &clause.body),
                        None => self.visit_body(&clause.body),
                    }
                }
            }
            Stmt::Assert(stmt) => {
                self.asked(Around::Assert, &stmt.test);
                self.visit_expr(&stmt.test);
                stmt.msg.iter().for_each(|m| self.visit_expr(m));
            }
            Stmt::FunctionDef(f) => self.function(f),
            Stmt::ClassDef(class) => self.class(class),
            // Docstrings.
            Stmt::Expr(e) if e.value.is_string_literal_expr() => {}
            _ => visitor::walk_stmt(self, stmt),
        }
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        match expr {
            Expr::Attribute(attribute) => self.attribute(expr, attribute),
            Expr::Call(call) => {
                self.call(call);
                self.arguments(call);
            }
            // What is compared or looked up is not what is given.
            Expr::Compare(compare) => self.comparison(expr, compare),
            Expr::Dict(dict) => self.in_slot(false, |w| {
                for item in &dict.items {
                    item.key.iter().for_each(|k| w.as_key(true, |w| w.visit_expr(k)));
                    w.visit_expr(&item.value);
                }
            }),
            Expr::If(either) => self.either(either),
            Expr::Subscript(_) => {
                for (rule, when) in &self.table.indices {
                    if let When::Index(find) = when
                        && let Some(hit) = find(expr, &self.model)
                    {
                        self.strike(rule, hit);
                    }
                }
                self.in_slot(false, |w| w.as_key(true, |w| visitor::walk_expr(w, expr)));
            }
            Expr::Set(_) => self.as_key(true, |w| visitor::walk_expr(w, expr)),
            Expr::StringLiteral(s) => self.string(expr, s.value.to_str()),
            Expr::FString(f) => {
                // The text in front of the first value.
                let first = f.value.elements().next().and_then(|e| e.as_literal());
                if let Some(first) = first {
                    self.string(expr, first.value.as_ref());
                }
                visitor::walk_expr(self, expr);
            }
            Expr::Named(named) => {
                self.visit_expr(&named.value);
                let kind = self.model.kind(&named.value);
                self.model.assign(&named.target, Some(&named.value), kind);
            }
            Expr::Lambda(_) => {
                self.model.within.push(Within::Lambda);
                visitor::walk_expr(self, expr);
                self.model.within.pop();
            }
            Expr::ListComp(c) => self.comprehension(expr, &c.generators),
            Expr::SetComp(c) => self.as_key(true, |w| w.comprehension(expr, &c.generators)),
            Expr::DictComp(c) => self.as_key(true, |w| w.comprehension(expr, &c.generators)),
            Expr::Generator(c) => self.comprehension(expr, &c.generators),
            _ => visitor::walk_expr(self, expr),
        }
    }
}

/// Whether a name is for a device.
fn is_device_name(expr: &Expr) -> bool {
    last(expr).is_some_and(|n| n.to_ascii_lowercase().contains("device"))
}

impl<'a> Walk<'a> {
    fn annotated(&mut self, assign: &'a StmtAnnAssign) {
        let device = is_device_name(&assign.target);
        self.in_slot(device, |w| assign.value.iter().for_each(|v| w.visit_expr(v)));
        let kind = match self.model.annotated(&assign.annotation) {
            Kind::Unknown => assign.value.as_deref().map_or(Kind::Unknown, |v| self.model.kind(v)),
            known => known,
        };
        self.model.assign(&assign.target, assign.value.as_deref(), kind);
    }

    fn branch(&mut self, test: &'a Expr, body: &'a [Stmt]) {
        self.truth(test);
        self.before(body, |w| w.visit_expr(test));
        self.guarded(test, body);
    }

    fn attribute(&mut self, expr: &'a Expr, attribute: &'a ExprAttribute) {
        for (rule, when) in self.table.attributes.get(attribute.attr.as_str()).into_iter().flatten() {
            if let When::Attribute(_, find) = when
                && let Some(hit) = find(expr, &self.model)
            {
                self.strike(rule, hit);
            }
        }
        match self.model.path(expr) {
            Some(path) => {
                let root = self.model.root(expr).map(str::to_owned);
                self.named(&path, root.as_deref(), expr);
            }
            None => self.visit_expr(&attribute.value),
        }
    }

    fn comparison(&mut self, expr: &'a Expr, compare: &'a ExprCompare) {
        // A word for a device is compared with what tells of devices.
        let source = self.model.source(expr.range());
        let of_devices = ["device", ".type", "accelerator"].iter().any(|w| source.contains(w));
        let compared = if of_devices { Compared::Device } else { Compared::Other };
        let before = std::mem::replace(&mut self.model.compared, compared);
        // What is compared with a name for a device follows what that name is given.
        let named = std::iter::once(&*compare.left).chain(&compare.comparators).any(is_device_name);
        self.in_slot(named, |w| visitor::walk_expr(w, expr));
        self.model.compared = before;
    }

    fn either(&mut self, either: &'a ExprIf) {
        self.truth(&either.test);
        self.visit_expr(&either.test);
        let around = self.model.within.len();
        self.model.within.extend(self.model.guard(&either.test));
        self.visit_expr(&either.body);
        self.model.within.truncate(around);
        self.visit_expr(&either.orelse);
    }

    fn in_slot(&mut self, is: bool, walk: impl FnOnce(&mut Walk<'a>)) {
        let before = std::mem::replace(&mut self.model.device_slot, is);
        walk(self);
        self.model.device_slot = before;
    }

    /// What is a key of a table or a member of a set, or is only shown.
    fn as_key(&mut self, is: bool, walk: impl FnOnce(&mut Walk<'a>)) {
        let to = if is && self.model.compared == Compared::No { Compared::Key } else { self.model.compared };
        let before = std::mem::replace(&mut self.model.compared, to);
        walk(self);
        self.model.compared = before;
    }

    /// The test in front of some statements.
    fn before(&mut self, body: &'a [Stmt], walk: impl FnOnce(&mut Walk<'a>)) {
        let has = |s: &Stmt| {
            let source = self.model.source(s.range());
            KERNELS.iter().any(|k| source.contains(k))
        };
        self.model.for_kernels = body.iter().any(has);
        walk(self);
        self.model.for_kernels = false;
    }

    /// What is called and with what, with an eye to parameters for devices.
    fn arguments(&mut self, call: &'a ExprCall) {
        self.in_slot(false, |w| w.visit_expr(&call.func));
        let name = last(&call.func).unwrap_or_default();
        let takes = matches!(
            name,
            "device"
                | "to"
                | "autocast"
                | "GradScaler"
                | "set_default_device"
                | "init_device_mesh"
                | "Generator"
        );
        let option = name == "add_argument"
            && call.arguments.args.iter().any(|a| literal(a).is_some_and(|t| t.contains("device")));
        let key =
            matches!(name, "add" | "get" | "setdefault" | "discard" | "append" | "hash" | "print" | "set");
        for (i, argument) in call.arguments.args.iter().enumerate() {
            self.in_slot(takes && i == 0, |w| w.as_key(key, |w| w.visit_expr(argument)));
        }
        for keyword in &call.arguments.keywords {
            let name = keyword.arg.as_ref().map_or("", |a| a.as_str());
            let device = name.contains("device") || name == "map_location" || (option && name == "default");
            self.in_slot(device, |w| w.visit_expr(&keyword.value));
        }
    }

    fn guarded(&mut self, test: &'a Expr, body: &'a [Stmt]) {
        self.model.tests.push(self.model.source(test.range()));
        // A branch that leaves the loop or the program runs once.
        let ends = matches!(body.last(), Some(Stmt::Raise(_) | Stmt::Break(_))).then_some(Within::Seldom);
        match self.model.guard(test).or(ends) {
            Some(within) => self.inside(within, body),
            None => self.visit_body(body),
        }
        self.model.tests.pop();
    }

    fn comprehension(&mut self, expr: &'a Expr, generators: &'a [ruff_python_ast::Comprehension]) {
        let around = self.model.elements.len();
        for g in generators {
            self.model.assign_each(&g.target, &g.iter);
            if let Expr::Name(name) = &g.target {
                self.model.elements.push(name.id.as_str());
            }
            g.ifs.iter().for_each(|test| self.truth(test));
        }
        visitor::walk_expr(self, expr);
        self.model.elements.truncate(around);
    }
}
