//! PyTorch's schema strings: `add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor`.

/// One overload of one op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema {
    /// `add`
    pub base: String,
    /// `Tensor`, or empty.
    pub overload: String,
    /// The arguments, positional ones first.
    pub args: Vec<Argument>,
    /// The results.
    pub returns: Vec<Return>,
}

/// One argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// `self`
    pub name: String,
    /// The type without alias marks and list lengths, symbolic sizes as plain ones: `Tensor`, `int[]?`, `Tensor?[]`.
    pub ty: String,
    /// `(a!)`
    pub alias: Option<Alias>,
    /// Whether it stands after the `*`.
    pub kwarg_only: bool,
    /// The text after `=`.
    pub default: Option<String>,
}

/// One result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Return {
    /// The type, spelled as in [`Argument::ty`].
    pub ty: String,
    /// `(a!)` or `(a)`
    pub alias: Option<Alias>,
}

/// An alias mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The names before the arrow: `a`, `a|b`, `*`.
    pub set: String,
    /// Whether the mark has a `!`: the op writes there.
    pub write: bool,
}

/// A schema string that does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot parse schema `{text}`: {reason}")]
pub struct ParseError {
    text: String,
    reason: &'static str,
}

impl Argument {
    /// The op writes into this argument.
    pub fn writes(&self) -> bool {
        self.alias.as_ref().is_some_and(|a| a.write)
    }

    /// A destination: written to and after the `*`.
    pub fn is_out(&self) -> bool {
        self.kwarg_only && self.writes()
    }

    /// Says where or how, not what: strides, place and copying are not a lowering's business.
    pub fn is_placement(&self) -> bool {
        matches!(
            self.ty.as_str(),
            "Device?" | "Device" | "Layout?" | "Layout" | "MemoryFormat?" | "MemoryFormat" | "Stream?"
        ) || matches!(self.name.as_str(), "pin_memory" | "non_blocking" | "sparse_grad")
    }
}

impl Schema {
    /// Reads a schema as `str(schema)` prints it, with or without the `aten::`.
    pub fn parse(text: &str) -> Result<Schema, ParseError> {
        let fail = |reason| ParseError { text: text.to_string(), reason };
        let body = text.trim();
        let body = body.strip_prefix("aten::").unwrap_or(body);
        let open = body.find('(').ok_or(fail("no argument list"))?;
        let close = closing(body, open).ok_or(fail("argument list does not end"))?;
        let (base, overload) = body[..open].split_once('.').unwrap_or((&body[..open], ""));
        let mut args = Vec::new();
        let mut kwarg_only = false;
        for part in split(&body[open + 1..close]) {
            if part == "*" {
                kwarg_only = true;
                continue;
            }
            args.push(parse_argument(part, kwarg_only).ok_or(fail("bad argument"))?);
        }
        let rest = body[close + 1..].trim().strip_prefix("->").ok_or(fail("no arrow"))?.trim();
        let list = match rest.strip_prefix('(') {
            Some(_) if closing(rest, 0) == Some(rest.len() - 1) => split(&rest[1..rest.len() - 1]),
            _ => vec![rest],
        };
        let returns = list.into_iter().map(parse_return).collect();
        Ok(Schema { base: base.to_string(), overload: overload.to_string(), args, returns })
    }

    /// `add.Tensor`
    pub fn name(&self) -> String {
        if self.overload.is_empty() { self.base.clone() } else { format!("{}.{}", self.base, self.overload) }
    }

    /// Positions of the `out=` arguments.
    pub fn outs(&self) -> Vec<usize> {
        (0..self.args.len()).filter(|&i| self.args[i].is_out()).collect()
    }

    /// Positions of the arguments that are written and are no `out=`.
    pub fn mutated(&self) -> Vec<usize> {
        (0..self.args.len()).filter(|&i| self.args[i].writes() && !self.args[i].is_out()).collect()
    }
}

/// Index of the bracket that closes the one at `open`.
fn closing(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in text.char_indices().skip_while(|(i, _)| *i < open) {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

/// The parts between top-level commas.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut quoted, mut start, mut parts) = (0, false, 0, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '"' | '\'' => quoted = !quoted,
            '(' | '[' if !quoted => depth += 1,
            ')' | ']' if !quoted => depth -= 1,
            ',' if depth == 0 && !quoted => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|p| !p.is_empty());
    parts
}

fn parse_argument(text: &str, kwarg_only: bool) -> Option<Argument> {
    let (declaration, default) = match text.split_once('=') {
        Some((d, v)) => (d.trim(), Some(v.trim().to_string())),
        None => (text, None),
    };
    let (ty, name) = declaration.rsplit_once(' ')?;
    let (ty, alias) = parse_type(ty.trim());
    Some(Argument { name: name.to_string(), ty, alias, kwarg_only, default })
}

fn parse_return(text: &str) -> Return {
    // A result may carry a name after its type; a type holds spaces only inside an alias mark.
    let end = match (text.rfind(' '), text.rfind([')', ']'])) {
        (Some(space), Some(bracket)) if space > bracket => space,
        (Some(space), None) => space,
        _ => text.len(),
    };
    let (ty, alias) = parse_type(&text[..end]);
    Return { ty, alias }
}

/// Takes the alias mark out of a type and reduces it to its normal spelling.
fn parse_type(text: &str) -> (String, Option<Alias>) {
    let mut ty = text.to_string();
    let mut alias = None;
    if let Some(open) = text.find('(')
        && let Some(close) = closing(text, open)
    {
        let before = text[open + 1..close].split("->").next().unwrap_or_default().trim();
        alias = Some(Alias { set: before.trim_end_matches('!').to_string(), write: before.ends_with('!') });
        ty.replace_range(open..=close, "");
    }
    let mut normal = String::new();
    let mut in_list = false;
    for c in ty.replace("SymInt", "int").chars() {
        match c {
            '[' => in_list = true,
            ']' => in_list = false,
            _ if in_list => continue,
            _ => {}
        }
        normal.push(c);
    }
    (normal, alias)
}
