//! The flag grammar of upstream's programs: spf13/pflag as cobra uses it, plus the extensions of Go's own `flag` (one dash
//! before a long name, `_` in the names of logging flags).

use super::gotype::{self, GoDuration};
use super::retired::Retired;
use super::selector;
use crate::nearest::nearest;

/// The target of a parsed value; its variant is the flag's kind, and it holds the default.
pub(super) enum Slot<'a> {
    Text(&'a mut String),
    Bool(&'a mut bool),
    Int(&'a mut i64),
    Uint(&'a mut u64),
    Float(&'a mut f32),
    Duration(&'a mut GoDuration),
    List(&'a mut Vec<String>),
    /// Each use adds one text, without splitting at commas.
    Repeated(&'a mut Vec<String>),
    /// Text that must parse as a Kubernetes label selector.
    Selector(&'a mut String),
    /// A klog severity.
    Severity(&'a mut i64),
    /// Another spelling of the named flag.
    AliasOf(&'static str),
}

/// One flag that this program knows.
pub(super) struct Flag<'a> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) slot: Slot<'a>,
    /// Hidden from the usage text; use causes a warning with this text.
    pub(super) deprecated: Option<&'static str>,
    /// A Go logging flag: `_` may be typed instead of `-`.
    pub(super) logging: bool,
    /// The list was set before: the next use appends instead of replacing the default.
    changed: bool,
}

impl<'a> Flag<'a> {
    pub(super) fn new(name: &'static str, slot: Slot<'a>, help: &'static str) -> Self {
        Self {
            name,
            help,
            slot,
            deprecated: None,
            logging: false,
            changed: false,
        }
    }

    pub(super) fn deprecated(mut self, why: &'static str) -> Self {
        self.deprecated = Some(why);
        self
    }

    pub(super) fn logging(mut self) -> Self {
        self.logging = true;
        self
    }

    /// The value's type in the usage text; `None` for booleans, which need none.
    pub(super) fn value_word(&self) -> Option<&'static str> {
        match self.slot {
            Slot::Bool(_) => None,
            Slot::Text(_) | Slot::AliasOf(_) | Slot::Selector(_) => Some("string"),
            Slot::Int(_) => Some("int"),
            Slot::Uint(_) => Some("uint"),
            Slot::Float(_) => Some("float32"),
            Slot::Duration(_) => Some("duration"),
            Slot::List(_) => Some("strings"),
            Slot::Repeated(_) => Some("stringArray"),
            Slot::Severity(_) => Some("severity"),
        }
    }

    /// The default in the usage text; `None` for the zero value.
    pub(super) fn shown_default(&self) -> Option<String> {
        match &self.slot {
            Slot::Text(text) | Slot::Selector(text) if !text.is_empty() => {
                Some(format!("{text:?}"))
            }
            Slot::Bool(true) => Some("true".to_owned()),
            Slot::Int(number) | Slot::Severity(number) if **number != 0 => Some(number.to_string()),
            Slot::Uint(number) if **number != 0 => Some(number.to_string()),
            Slot::Float(number) if **number != 0.0 => Some(number.to_string()),
            Slot::List(items) | Slot::Repeated(items) if !items.is_empty() => {
                Some(format!("{items:?}"))
            }
            Slot::Duration(duration) if duration.0 != 0 => Some(duration.to_string()),
            _ => None,
        }
    }

    /// Parses the value; Go's own `flag` package gives no reason for its booleans and numbers.
    fn set(&mut self, text: &str) -> Result<(), String> {
        let plain = self.logging && matches!(self.slot, Slot::Bool(_) | Slot::Uint(_));
        self.read(text)
            .map_err(|why| if plain { "parse error".to_owned() } else { why })
    }

    fn read(&mut self, text: &str) -> Result<(), String> {
        match &mut self.slot {
            Slot::Text(slot) => text.clone_into(slot),
            Slot::Bool(slot) => **slot = gotype::parse_bool(text)?,
            Slot::Int(slot) => **slot = gotype::parse_int(text)?,
            Slot::Uint(slot) => **slot = gotype::parse_uint(text)?,
            Slot::Float(slot) => **slot = gotype::parse_float(text)?,
            Slot::Duration(slot) => **slot = GoDuration::parse(text)?,
            Slot::Severity(slot) => **slot = gotype::parse_severity(text)?,
            Slot::Selector(slot) => {
                selector::check(text)?;
                text.clone_into(slot);
            }
            Slot::List(slot) => {
                let items = gotype::parse_list(text)?;
                if !self.changed {
                    slot.clear();
                }
                slot.extend(items);
            }
            Slot::Repeated(slot) => slot.push(text.to_owned()),
            Slot::AliasOf(_) => (), // Resolved by the parser.
        }
        self.changed = true;
        Ok(())
    }
}

/// What a command line contained besides values.
#[derive(Default, Debug)]
pub(super) struct Outcome {
    pub(super) help: bool,
    pub(super) warnings: Vec<String>,
    /// Arguments that are no flags.
    pub(super) positional: Vec<String>,
}

/// Reads `args` (without the program's name) into the slots.
///
/// # Errors
/// The first error, in pflag's words; for an unknown flag also the nearest known one.
pub(super) fn parse(
    flags: &mut [Flag<'_>],
    retired: &'static [Retired],
    args: &[String],
) -> Result<Outcome, String> {
    let mut parser = Parser {
        flags,
        retired,
        outcome: Outcome::default(),
        rest: args.iter(),
    };
    while let Some(arg) = parser.rest.next() {
        if arg == "--" {
            let rest = parser.rest.by_ref().cloned();
            parser.outcome.positional.extend(rest);
        } else if let Some(body) = arg.strip_prefix("--") {
            parser.long(arg, body)?;
        } else if let Some(body) = arg.strip_prefix('-').filter(|body| !body.is_empty()) {
            parser.short(arg, body)?;
        } else {
            parser.outcome.positional.push(arg.clone());
        }
    }
    Ok(parser.outcome)
}

struct Parser<'f, 'a, 'r> {
    flags: &'f mut [Flag<'a>],
    retired: &'static [Retired],
    outcome: Outcome,
    rest: std::slice::Iter<'r, String>,
}

impl Parser<'_, '_, '_> {
    fn long(&mut self, arg: &str, body: &str) -> Result<(), String> {
        let (name, value) = split_value(body);
        if name.is_empty() || name.starts_with('-') {
            return Err(format!("bad flag syntax: {arg}"));
        }
        match self.find(name) {
            Some(index) => self.set(index, &format!("--{name}"), value),
            None if name == "help" => self.help(value),
            None => self.unknown(name, value, &format!("unknown flag: --{name}")),
        }
    }

    /// After one dash: a long name, as Go's `flag` accepts it, else pflag's shorthands `h` and `v`.
    fn short(&mut self, arg: &str, body: &str) -> Result<(), String> {
        let (name, value) = split_value(body);
        if name.chars().count() > 1 {
            if let Some(index) = self.find(name) {
                return self.set(index, &format!("--{name}"), value);
            }
            if name == "help" {
                return self.help(value);
            }
            if self.retired(name).is_some() {
                return self.unknown(name, value, "");
            }
        }
        let mut letters = body;
        while let Some(letter) = letters.chars().next() {
            let after = &letters[letter.len_utf8()..];
            match (letter, self.find("v")) {
                ('h', _) => self.outcome.help = true,
                ('v', Some(index)) => {
                    let value = after.strip_prefix('=').unwrap_or(after);
                    let value = Some(value).filter(|_| !after.is_empty());
                    return self.set(index, &format!("'v' in {arg}"), value);
                }
                _ => {
                    let message = format!("unknown shorthand flag: {letter:?} in {arg}");
                    return Err(format!("{message}{}", self.hint(name)));
                }
            }
            letters = after;
        }
        Ok(())
    }

    fn help(&mut self, value: Option<&str>) -> Result<(), String> {
        let text = value.unwrap_or("true");
        self.outcome.help = gotype::parse_bool(text)
            .map_err(|why| format!("invalid argument {text:?} for \"-h, --help\" flag: {why}"))?;
        Ok(())
    }

    fn find(&self, name: &str) -> Option<usize> {
        let dashed = name.replace('_', "-");
        self.flags
            .iter()
            .position(|flag| flag.name == name || (flag.logging && flag.name == dashed))
    }

    fn set(&mut self, index: usize, typed: &str, value: Option<&str>) -> Result<(), String> {
        let Some(flag) = self.flags.get(index) else {
            return Ok(());
        };
        let value = match (value, &flag.slot) {
            (Some(value), _) => value.to_owned(),
            (None, Slot::Bool(_)) => "true".to_owned(),
            (None, _) => self
                .rest
                .next()
                .cloned()
                .ok_or_else(|| format!("flag needs an argument: {typed}"))?,
        };
        if let Some(why) = flag.deprecated {
            self.outcome
                .warnings
                .push(format!("Flag --{} has been deprecated, {why}", flag.name));
        }
        let name = flag.name;
        let index = match flag.slot {
            Slot::AliasOf(other) => self.find(other).unwrap_or(index),
            _ => index,
        };
        let Some(flag) = self.flags.get_mut(index) else {
            return Ok(());
        };
        let shown = if name.len() == 1 {
            format!("-{name}, --{name}")
        } else {
            format!("--{name}")
        };
        flag.set(&value)
            .map_err(|why| format!("invalid argument {value:?} for {shown:?} flag: {why}"))
    }

    fn retired(&self, name: &str) -> Option<&'static Retired> {
        self.retired.iter().find(|retired| retired.name == name)
    }

    /// Skips a flag that another release has; refuses one that never existed.
    fn unknown(&mut self, name: &str, value: Option<&str>, message: &str) -> Result<(), String> {
        let Some(retired) = self.retired(name) else {
            return Err(format!("{message}{}", self.hint(name)));
        };
        if value.is_none() {
            self.rest.next();
        }
        let warning = format!("--{name} is ignored: {}", retired.why);
        if !self.outcome.warnings.contains(&warning) {
            self.outcome.warnings.push(warning);
        }
        Ok(())
    }

    fn hint(&self, name: &str) -> String {
        let known = self
            .flags
            .iter()
            .filter(|flag| flag.deprecated.is_none())
            .map(|flag| flag.name);
        nearest(name, known)
            .map(|near| format!(" (did you mean --{near}?)"))
            .unwrap_or_default()
    }
}

fn split_value(body: &str) -> (&str, Option<&str>) {
    match body.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (body, None),
    }
}
