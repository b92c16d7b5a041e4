//! Named values: options given to a plugin and attributes read from it.

use std::collections::BTreeMap;
use std::fmt;

use oxitorch_pjrt_sys as sys;
use sys::CStruct;

use crate::api::{slice, text};

/// A value with a name: an option of a client or topology, an attribute of a plugin or device.
#[derive(Clone, PartialEq, Debug)]
pub enum NamedValue {
    /// Text.
    String(String),
    /// An integer.
    Int(i64),
    /// Several integers.
    Ints(Vec<i64>),
    /// A float.
    Float(f32),
    /// A flag.
    Bool(bool),
    /// A kind that this crate does not know.
    Unknown(u32),
}

/// Attributes by name.
pub type Attributes = BTreeMap<String, NamedValue>;

impl NamedValue {
    /// The kind, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            NamedValue::String(_) => "string",
            NamedValue::Int(_) => "int64",
            NamedValue::Ints(_) => "list of int64",
            NamedValue::Float(_) => "float",
            NamedValue::Bool(_) => "bool",
            NamedValue::Unknown(_) => "unknown",
        }
    }

    /// The integer, if it is one.
    pub fn as_int(&self) -> Option<i64> {
        if let NamedValue::Int(i) = self { Some(*i) } else { None }
    }

    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        if let NamedValue::String(s) = self { Some(s) } else { None }
    }
}

impl fmt::Display for NamedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NamedValue::String(s) => f.write_str(s),
            NamedValue::Int(i) => write!(f, "{i}"),
            NamedValue::Ints(v) => write!(f, "{v:?}"),
            NamedValue::Float(x) => write!(f, "{x}"),
            NamedValue::Bool(b) => write!(f, "{b}"),
            NamedValue::Unknown(kind) => write!(f, "<value of kind {kind}>"),
        }
    }
}

/// The C form of an option; it points into `name` and `value`, which must outlive it.
pub(crate) fn to_c(name: &str, value: &NamedValue) -> sys::PJRT_NamedValue {
    let mut c = sys::PJRT_NamedValue::sized();
    c.name = name.as_ptr().cast();
    c.name_size = name.len();
    c.value_size = 1;
    match value {
        NamedValue::String(s) => {
            c.type_ = sys::PJRT_NamedValue_kString;
            c.__bindgen_anon_1.string_value = s.as_ptr().cast();
            c.value_size = s.len();
        }
        NamedValue::Int(i) => {
            c.type_ = sys::PJRT_NamedValue_kInt64;
            c.__bindgen_anon_1.int64_value = *i;
        }
        NamedValue::Ints(v) => {
            c.type_ = sys::PJRT_NamedValue_kInt64List;
            c.__bindgen_anon_1.int64_array_value = v.as_ptr();
            c.value_size = v.len();
        }
        NamedValue::Float(x) => {
            c.type_ = sys::PJRT_NamedValue_kFloat;
            c.__bindgen_anon_1.float_value = *x;
        }
        NamedValue::Bool(b) => {
            c.type_ = sys::PJRT_NamedValue_kBool;
            c.__bindgen_anon_1.bool_value = *b;
        }
        // Options are checked before they come here; a kind that the plugin does not know is refused there.
        NamedValue::Unknown(kind) => c.type_ = *kind,
    }
    c
}

/// Copies a plugin's array of named values.
///
/// # Safety
/// `first` is null or points to `count` values as a plugin lays them out.
pub(crate) unsafe fn from_c(first: *const sys::PJRT_NamedValue, count: usize) -> Attributes {
    let mut out = Attributes::new();
    if first.is_null() || count == 0 {
        return out;
    }
    // The plugin steps by the size of its own struct, which a newer one may have made larger.
    // SAFETY: there is at least one value, and `struct_size` is its first field.
    let step = match unsafe { (&raw const (*first).struct_size).read() } {
        0 => size_of::<sys::PJRT_NamedValue>(),
        size => size.next_multiple_of(align_of::<sys::PJRT_NamedValue>()),
    };
    for i in 0..count {
        // SAFETY: within the array; the union's field is the one that `type_` names; lengths are the plugin's.
        unsafe {
            let c = first.byte_add(i * step).read();
            let (v, n) = (c.__bindgen_anon_1, c.value_size);
            let value = match c.type_ {
                sys::PJRT_NamedValue_kString => NamedValue::String(text(v.string_value, n)),
                sys::PJRT_NamedValue_kInt64 => NamedValue::Int(v.int64_value),
                sys::PJRT_NamedValue_kInt64List => NamedValue::Ints(slice(v.int64_array_value, n).to_vec()),
                sys::PJRT_NamedValue_kFloat => NamedValue::Float(v.float_value),
                sys::PJRT_NamedValue_kBool => NamedValue::Bool(v.bool_value),
                kind => NamedValue::Unknown(kind),
            };
            out.insert(text(c.name, c.name_size), value);
        }
    }
    out
}
