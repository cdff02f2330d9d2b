//! Why a command line was refused: one line, what to print, and the exit code.

use std::fmt;

/// A refused command line. The caller does one thing with it: print [`Self::rendered`] to standard error
/// and exit with [`Self::exit_code`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    message: String,
    rendered: String,
    exit_code: u8,
}

impl ConfigError {
    /// An inconsistent plan or a bad value: one line, exit code 1.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        let message = message.into();
        let rendered = format!("error: {message}\n");
        Self {
            message,
            rendered,
            exit_code: 1,
        }
    }

    /// As upstream prints it: `Error: ...`, then the usage of the program; exit code 1.
    #[must_use]
    pub fn with_usage(message: impl Into<String>, usage: &str) -> Self {
        let message = message.into();
        let rendered = format!("Error: {message}\n{usage}");
        Self {
            message,
            rendered,
            exit_code: 1,
        }
    }

    /// A native command line that cannot be read, already rendered, by clap for the most part; exit code 2.
    #[must_use]
    pub fn refused(rendered: String) -> Self {
        let first = rendered.lines().next().unwrap_or_default();
        let message = first.strip_prefix("error: ").unwrap_or(first).to_owned();
        Self {
            message,
            rendered,
            exit_code: 2,
        }
    }

    /// The one line that names the input and the remedy.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Everything for standard error, ending in a newline.
    #[must_use]
    pub fn rendered(&self) -> &str {
        &self.rendered
    }

    /// What the process exits with.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ConfigError {}
