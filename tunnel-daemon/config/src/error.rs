//! Why a command line was refused: one line, and the exit code.

use std::fmt;

/// Appended to clap's own messages.
const SEE_HELP: &str = "--help lists the flags";

/// A refused command line. The caller prints it as the last line, and exits with [`Self::exit_code`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    message: String,
    exit_code: u8,
    is_json: bool,
}

impl ConfigError {
    /// An inconsistent plan or a bad value: exit code 1.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            exit_code: 1,
            is_json: false,
        }
    }

    /// For `map_err`: prefixes the error with the flag's name.
    pub(crate) fn about<E: fmt::Display>(flag: &str) -> impl Fn(E) -> Self {
        move |why| Self::new(format!("{flag}: {why}"))
    }

    /// A native command line that clap refused, in clap's words; exit code 2.
    #[must_use]
    pub fn refused(rendered: &str) -> Self {
        Self {
            message: one_line(rendered),
            exit_code: 2,
            is_json: false,
        }
    }

    /// The same error about a flag from the environment or a file: adds the flag's origin.
    pub(super) fn of(self, origin: &str) -> Self {
        Self {
            message: format!("{origin}: {}", self.message),
            exit_code: 1,
            ..self
        }
    }

    /// The same error, to be reported as JSON.
    pub(super) fn in_json(self) -> Self {
        Self {
            is_json: true,
            ..self
        }
    }

    /// Whether the file or the environment asks for JSON.
    #[must_use]
    pub fn is_json(&self) -> bool {
        self.is_json
    }

    /// The line that names the input and the remedy.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

/// Returns from the function with [`ConfigError::new`] of a formatted message.
macro_rules! bail {
    ($($message:tt)+) => {
        return Err($crate::error::ConfigError::new(format!($($message)+)))
    };
}

pub(crate) use bail;

/// Clap's message without the usage text: the error, its input, and the tip.
fn one_line(rendered: &str) -> String {
    let told = rendered.split("\n\nUsage:").next().unwrap_or_default();
    let told = told
        .split("\n\nFor more information")
        .next()
        .unwrap_or_default();
    let mut line = String::new();
    for part in told.lines().map(str::trim).filter(|part| !part.is_empty()) {
        if !line.is_empty() {
            line.push_str(if part.starts_with("tip: ") { "; " } else { " " });
        }
        line.push_str(part);
    }
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    format!("{line}; {SEE_HELP}")
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_errors_become_one_line_without_usage() {
        for (rendered, line) in [
            (
                "error: unexpected argument '--helth-port' found\n\n  tip: a similar argument exists: '--health-port'\n\n\
                 Usage: adit server --health-port <PORT>\n\nFor more information, try '--help'.\n",
                "unexpected argument '--helth-port' found; tip: a similar argument exists: '--health-port'; \
                 --help lists the flags",
            ),
            (
                "error: the following required arguments were not provided:\n  --ca-cert <FILE>\n\n\
                 Usage: adit agent --ca-cert <FILE>\n\nFor more information, try '--help'.\n",
                "the following required arguments were not provided: --ca-cert <FILE>; --help lists the flags",
            ),
            (
                "error: invalid value 'x' for '--health-port <PORT>': write off\n\nFor more information, try '--help'.\n",
                "invalid value 'x' for '--health-port <PORT>': write off; --help lists the flags",
            ),
        ] {
            let error = ConfigError::refused(rendered);
            assert_eq!((error.message(), error.exit_code()), (line, 2));
        }
    }
}
