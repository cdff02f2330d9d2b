//! Parses a machine's console, line by line: see `init.sh`.

use std::collections::BTreeMap;

/// Lines shown in an error.
const LAST: usize = 30;

/// Result of an entry.
#[derive(Clone, Debug, Default)]
pub(super) struct EntryResult {
    /// Exit status; `None` if the machine ended before the entry did.
    pub(super) status: Option<i32>,
    /// Duration in the machine, seconds.
    pub(super) seconds: f64,
    /// The last lines it printed.
    pub(super) lines: Vec<String>,
}

/// A console line that reports the end of an entry.
pub(super) struct Ended<'a> {
    /// The entry's name on the console.
    pub(super) name: &'a str,
    /// Exit status, as printed.
    pub(super) status: &'a str,
    /// Duration in the machine, seconds.
    pub(super) seconds: f64,
}

/// Parses the line if it reports the end of an entry.
pub(super) fn ended(line: &str) -> Option<Ended<'_>> {
    let mut words = line.split_whitespace();
    if words.next() != Some("@@end") {
        return None;
    }
    let (name, status, begin, end) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let number = |text: &str| text.parse::<f64>().unwrap_or_default();
    Some(Ended {
        name,
        status,
        seconds: number(end) - number(begin),
    })
}

/// Everything read from the console.
#[derive(Default)]
pub(super) struct Console {
    hello: Option<String>,
    complete: bool,
    current: Option<String>,
    ran: BTreeMap<String, EntryResult>,
    /// Modules that could not be loaded, with the reason.
    pub(super) modules: Vec<String>,
    lines: Vec<String>,
}

impl Console {
    /// Parses these lines.
    pub(super) fn of<'a>(lines: impl IntoIterator<Item = &'a str>) -> Self {
        let mut console = Self::default();
        for line in lines {
            console.handle_line(line);
        }
        console
    }

    /// Parses one line. Kernel messages in between are ignored.
    pub(super) fn handle_line(&mut self, line: &str) {
        self.lines.push(line.to_owned());
        if let Some(ended) = ended(line) {
            let ran = self.ran.entry(ended.name.to_owned()).or_default();
            ran.status = ended.status.parse().ok();
            ran.seconds = ended.seconds;
            self.current = None;
            return;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        match (words.as_slice(), &self.current) {
            (["@@hello", rest @ ..], _) => self.hello = Some(rest.join(" ")),
            (["@@module", rest @ ..], _) => self.modules.push(rest.join(" ")),
            (["@@begin", name], _) => {
                self.ran.insert((*name).to_owned(), EntryResult::default());
                self.current = Some((*name).to_owned());
            }
            (["@@bye"], _) => self.complete = true,
            (_, Some(name)) => {
                if let (Some(text), Some(ran)) = (line.strip_prefix("| "), self.ran.get_mut(name)) {
                    ran.lines.push(text.to_owned());
                }
            }
            _ => (),
        }
    }

    /// Whether the first process has started.
    pub(super) fn has_spoken(&self) -> bool {
        self.hello.is_some()
    }

    /// Whether the machine has run to its end.
    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Release and build of the kernel, as it reports them.
    pub(super) fn hello(&self) -> &str {
        self.hello.as_deref().unwrap_or_default()
    }

    /// Result of an entry, if it ran.
    pub(super) fn ran(&self, name: &str) -> Option<&EntryResult> {
        self.ran.get(name)
    }

    /// The last lines, for an error.
    pub(super) fn last_words(&self) -> String {
        let from = self.lines.len().saturating_sub(LAST);
        let last = self.lines.get(from..).unwrap_or_default();
        format!("its last lines:\n{}", last.join("\n"))
    }

    /// All lines.
    pub(super) fn lines(&self) -> &[String] {
        &self.lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_status_time_and_lines_despite_kernel_messages() {
        let console = Console::of([
            "SeaBIOS",
            "@@hello 6.1.0 #1 SMP Debian 6.1.192-2",
            "@@module tls.ko no such device",
            "@@begin a",
            "[    1.0] random message",
            "| yes",
            "@@end a 0 1.50 4.00",
            "@@begin b",
        ]);
        let a = console.ran("a").unwrap();
        assert_eq!((a.status, a.seconds), (Some(0), 2.5));
        assert_eq!(a.lines, ["yes"]);
        assert_eq!(console.ran("b").unwrap().status, None);
        assert!(console.hello().contains("Debian") && !console.is_complete());
        assert_eq!(console.modules, ["tls.ko no such device"]);
    }
}
