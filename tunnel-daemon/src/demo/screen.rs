//! Output for people: colours and a line that is redrawn on a terminal, plain lines otherwise.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::status::text::{WIDTH, clean, has_colours};

/// Moves to the start of the line and empties the line.
const ERASE: &str = "\r\x1b[K";

/// Emphasis of a text, as a terminal's code.
pub(super) type Tone = &'static str;
pub(super) const GOOD: Tone = "32";
pub(super) const BAD: Tone = "1;31";
pub(super) const HEADING: Tone = "1";
/// Less important.
pub(super) const FAINT: Tone = "2";
/// A command to copy.
pub(super) const COMMAND: Tone = "36";

/// Standard output: a terminal or a plain stream.
pub(super) struct Screen {
    /// A terminal that can be redrawn.
    pub(super) is_rich: bool,
    gone: AtomicBool,
}

impl Screen {
    /// Uses colours only on a terminal, and only without `plain` and `NO_COLOR`.
    pub(super) fn new(plain: bool) -> Self {
        Self {
            is_rich: !plain && has_colours(),
            gone: AtomicBool::new(false),
        }
    }

    /// Whether standard output has been closed by its reader.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// `text` in a tone, or unchanged without colours.
    pub(super) fn paint(&self, tone: Tone, text: impl fmt::Display) -> String {
        if self.is_rich {
            format!("\x1b[{tone}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }

    /// Prints a lasting line.
    pub(super) fn line(&self, text: impl fmt::Display) {
        let erase = if self.is_rich { ERASE } else { "" };
        self.write(format_args!("{erase}{text}\n"));
    }

    /// Shows the current activity in the last line, where it can be redrawn.
    pub(super) fn working(&self, text: &str) {
        if self.is_rich {
            self.write(format_args!("{ERASE}{}", clean(text, WIDTH - 1)));
        }
    }

    /// A closed pipe ends the demo; it is no reason to panic.
    fn write(&self, text: fmt::Arguments<'_>) {
        let mut out = io::stdout().lock();
        if out.write_fmt(text).and_then(|()| out.flush()).is_err() {
            self.gone.store(true, Relaxed);
        }
    }
}
