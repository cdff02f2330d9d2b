//! Output for people: colours and a spinner on a terminal, plain lines otherwise.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::status::text::has_colours;

/// How often the spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// Standard output: a terminal or a plain stream.
pub(super) struct Screen {
    spinner: Option<ProgressBar>,
    gone: AtomicBool,
}

/// Emphasis of a text.
#[derive(Clone, Copy)]
pub(super) enum Tone {
    /// Success.
    Good,
    /// Failure.
    Bad,
    /// A heading.
    Strong,
    /// Less important.
    Faint,
    /// A command to copy.
    Command,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Self::Good => "32",
            Self::Bad => "1;31",
            Self::Strong => "1",
            Self::Faint => "2",
            Self::Command => "36",
        }
    }
}

impl Screen {
    /// Uses colours only on a terminal, and only without `plain` and `NO_COLOR`.
    #[must_use]
    pub(super) fn new(plain: bool) -> Self {
        let rich = !plain && has_colours();
        let spinner = rich.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
            if let Ok(style) = ProgressStyle::with_template("{spinner:.cyan} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(TICK);
            bar
        });
        Self {
            spinner,
            gone: AtomicBool::new(false),
        }
    }

    /// Whether standard output is a terminal that can be redrawn.
    #[must_use]
    pub(super) fn is_rich(&self) -> bool {
        self.spinner.is_some()
    }

    /// Whether standard output has been closed by its reader.
    #[must_use]
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// `text` in a tone, or unchanged without colours.
    #[must_use]
    pub(super) fn paint(&self, tone: Tone, text: impl fmt::Display) -> String {
        if self.is_rich() {
            format!("\x1b[{}m{text}\x1b[0m", tone.code())
        } else {
            text.to_string()
        }
    }

    /// Prints a lasting line. A closed pipe ends the demo; it is no reason to panic.
    pub(super) fn line(&self, text: impl fmt::Display) {
        let write = || {
            if writeln!(io::stdout().lock(), "{text}").is_err() {
                self.gone.store(true, Relaxed);
            }
        };
        match &self.spinner {
            Some(spinner) if !spinner.is_finished() => spinner.suspend(write),
            _ => write(),
        }
    }

    /// Shows the current activity beside the spinner; nothing on a pipe.
    pub(super) fn working(&self, text: impl Into<String>) {
        if let Some(spinner) = &self.spinner {
            spinner.set_message(text.into());
        }
    }

    /// Prints the result of a step.
    pub(super) fn step(&self, name: &str, outcome: &Result<String, String>) {
        let (tone, mark, text) = match outcome {
            Ok(detail) => (Tone::Good, "ok   ", detail),
            Err(wrong) => (Tone::Bad, "WRONG", wrong),
        };
        let mark = match (self.is_rich(), outcome.is_ok()) {
            (true, true) => "✓",
            (true, false) => "✗",
            (false, _) => mark,
        };
        self.line(format_args!(
            "  {} {name}: {}",
            self.paint(tone, mark),
            if outcome.is_ok() {
                self.paint(Tone::Faint, text)
            } else {
                self.paint(Tone::Bad, text)
            }
        ));
    }

    /// Removes the spinner.
    pub(super) fn finish(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}
