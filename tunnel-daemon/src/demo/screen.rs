//! What people see: colours and a spinner on a terminal, plain lines otherwise.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often the spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// Standard output, one way or the other.
pub(super) struct Screen {
    spinner: Option<ProgressBar>,
    gone: AtomicBool,
}

/// How a piece of text stands out.
#[derive(Clone, Copy)]
pub(super) enum Tone {
    /// All is well.
    Good,
    /// Wrong.
    Bad,
    /// A heading.
    Strong,
    /// Less important.
    Faint,
    /// To be copied.
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
    /// Colours only if nobody asked for `plain`, directly or by `NO_COLOR`, and standard output is a terminal.
    #[must_use]
    pub(super) fn new(plain: bool) -> Self {
        let quiet = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let rich = !plain && !quiet("NO_COLOR") && !dumb && io::stdout().is_terminal();
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

    /// Whether there is a terminal to redraw.
    #[must_use]
    pub(super) fn is_rich(&self) -> bool {
        self.spinner.is_some()
    }

    /// Whether nobody reads any more.
    #[must_use]
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// `text` in a tone, or as it is.
    #[must_use]
    pub(super) fn paint(&self, tone: Tone, text: impl fmt::Display) -> String {
        if self.is_rich() {
            format!("\x1b[{}m{text}\x1b[0m", tone.code())
        } else {
            text.to_string()
        }
    }

    /// One line that stays. A pipe without a reader ends the demo and is no reason to panic.
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

    /// What goes on now, beside the spinner; nothing on a pipe.
    pub(super) fn working(&self, text: impl Into<String>) {
        if let Some(spinner) = &self.spinner {
            spinner.set_message(text.into());
        }
    }

    /// A step that is over.
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

    /// Takes the spinner away.
    pub(super) fn finish(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}
