//! Header values of a peer, made safe to show in an error.

use std::fmt;

use crate::text::Excerpt;

/// Header values as Go prints a list of strings, `[a b]`; at most four, each an excerpt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Values(String);

impl Values {
    pub(super) fn of(values: &[&[u8]]) -> Self {
        let mut shown: Vec<String> = values
            .iter()
            .take(4)
            .map(|value| Excerpt(&String::from_utf8_lossy(value)).to_string())
            .collect();
        if values.len() > shown.len() {
            shown.push(format!("… {} in all", values.len()));
        }
        Self(format!("[{}]", shown.join(" ")))
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
