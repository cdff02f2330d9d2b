//! Destination of log lines: a queue and a thread that writes to standard error or a file.
//!
//! The queue keeps a blocked standard error from stopping the data path. When it is full, lines are lost and counted, and the
//! log itself reports the loss.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, bounded};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tracing_subscriber::fmt::MakeWriter;

use adit_config::plan::LogFormat;

use crate::logfmt::own_line;

/// Limit on queued lines; at 200 bytes a line about 800 KiB.
pub(super) const LINES_MAX: usize = 4_096;
/// Limit on a line, bytes, so that a full queue takes at most 32 MiB: certificate names and paths may be as long as their
/// protocol allows. A longer line is truncated.
pub(super) const LINE_BYTES_MAX: usize = 8 * 1024;
/// Part kept of a longer line: it is written as a value, in which each quote is escaped.
const BEGINNING_BYTES_MAX: usize = LINE_BYTES_MAX / 2 - 256;
const TOO_LONG: &str = "a log line was too long: this is its beginning";
const LOST: &str = "log lines were dropped: the reader of the log output is too slow";
/// How long the end of the process waits for the queue in each of two steps.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

enum Message {
    Line(Vec<u8>),
    /// Dropped once all earlier lines are written.
    Flush(Sender<()>),
}

/// The writing end of the queue. Cheap to clone; never blocks.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    messages: Sender<Message>,
    lost: Arc<AtomicU64>,
    format: LogFormat,
}

impl Queue {
    /// Starts the thread that writes to `sink`, after calling `begin`; it ends with the last clone of the queue.
    pub(super) fn start(
        sink: impl Write + Send + 'static,
        lines_max: usize,
        format: LogFormat,
        begin: fn(),
    ) -> io::Result<Self> {
        let (messages, received) = bounded(lines_max);
        let lost = Arc::new(AtomicU64::new(0));
        let queue = Self {
            messages,
            lost: Arc::clone(&lost),
            format,
        };
        std::thread::Builder::new()
            .name("adit-log".to_owned())
            .spawn(move || {
                begin();
                write_lines(sink, &received, &lost, format);
            })?;
        Ok(queue)
    }

    /// Waits, with a timeout, until the lines queued so far are written.
    pub(super) fn flush(&self) {
        let (done, written) = bounded(1);
        if self
            .messages
            .send_timeout(Message::Flush(done), FLUSH_TIMEOUT)
            .is_ok()
        {
            // Disconnection is the signal; a timeout keeps a destination that hangs from blocking the process.
            let _written = written.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self
            .messages
            .try_send(Message::Line(bounded_line(line, self.format)))
            .is_err()
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = Self;

    fn make_writer(&'a self) -> Self::Writer {
        self.clone()
    }
}

/// The thread: writes lines in order, and reports lost lines as soon as it can write again.
fn write_lines(
    mut sink: impl Write,
    received: &Receiver<Message>,
    lost: &AtomicU64,
    format: LogFormat,
) {
    for message in received {
        match message {
            Message::Line(line) => {
                let _unwritable = sink.write_all(&line);
            }
            Message::Flush(done) => drop(done),
        }
        let missing = lost.swap(0, Ordering::Relaxed);
        if missing > 0 {
            let _unwritable = sink.write_all(loss_notice(missing, format).as_bytes());
        }
    }
}

/// The line, or a truncated one with a notice, as one line of the same format.
fn bounded_line(line: &[u8], format: LogFormat) -> Vec<u8> {
    if line.len() <= LINE_BYTES_MAX {
        return line.to_vec();
    }
    let beginning = |most: usize| {
        let text = String::from_utf8_lossy(line.get(..most).unwrap_or_default());
        text.trim_end_matches(char::REPLACEMENT_CHARACTER)
            .to_owned()
    };
    let bytes = line.len();
    let beginning = beginning(BEGINNING_BYTES_MAX);
    let cut = match format {
        LogFormat::Text => {
            let bytes = bytes.to_string();
            let fields = [("bytes", bytes.as_str()), ("beginning", beginning.as_str())];
            own_line("warn", TOO_LONG, &fields)
        }
        LogFormat::Json => {
            let line = serde_json::json!({
                "level": "WARN",
                "message": TOO_LONG,
                "beginning": beginning,
                "bytes": bytes,
                "target": "adit::log",
            });
            format!("{line}\n")
        }
    };
    cut.into_bytes()
}

fn loss_notice(lines: u64, format: LogFormat) -> String {
    match format {
        LogFormat::Text => own_line("warn", LOST, &[("lines", lines.to_string().as_str())]),
        LogFormat::Json => {
            let line = serde_json::json!({
                "level": "WARN",
                "message": LOST,
                "lines": lines,
                "target": "adit::log",
            });
            format!("{line}\n")
        }
    }
}

/// Where lines are written. A line that cannot be written is lost without a report.
#[derive(Debug)]
pub(super) struct Sink {
    /// `None`: standard error.
    file: Option<CappedFile>,
}

impl Sink {
    pub(super) fn stderr() -> Self {
        Self { file: None }
    }

    /// # Errors
    /// The file cannot be opened for appending.
    pub(super) fn file(path: &Path, bytes_max: Option<u64>) -> io::Result<Self> {
        let file = CappedFile::open(path, bytes_max)?;
        Ok(Self { file: Some(file) })
    }
}

impl Write for Sink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _lost = match &mut self.file {
            Some(file) => file.write_line(line),
            None => io::stderr().lock().write_all(line),
        };
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that is truncated instead of exceeding its limit.
#[derive(Debug)]
struct CappedFile {
    file: File,
    bytes: u64,
    bytes_max: Option<u64>,
}

impl CappedFile {
    fn open(path: &Path, bytes_max: Option<u64>) -> io::Result<Self> {
        // A pipe that no process reads would block the start.
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path)?;
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        let bytes = file.metadata()?.len();
        Ok(Self {
            file,
            bytes,
            bytes_max,
        })
    }

    fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        let length = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let bytes = self.bytes.saturating_add(length);
        if self.bytes_max.is_some_and(|max| bytes > max) {
            self.file.set_len(0)?;
            self.bytes = 0;
        }
        self.file.write_all(line)?;
        self.bytes = self.bytes.saturating_add(length);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::open;
    use crate::log::tests::{Captured, to_file};

    /// A destination that blocks until it is opened.
    struct Gate {
        entered: Sender<()>,
        open: Receiver<()>,
        behind: Captured,
    }

    impl Write for Gate {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _full = self.entered.try_send(());
            // Blocks while the gate is shut; an error means that the gate is open for good.
            let _opened = self.open.recv();
            self.behind.write(line)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gated(format: LogFormat) -> (Queue, Receiver<()>, Sender<()>, Captured) {
        let (entered, enters) = bounded(1);
        let (opener, open) = bounded(0);
        let behind = Captured::default();
        let gate = Gate {
            entered,
            open,
            behind: behind.clone(),
        };
        (
            Queue::start(gate, 2, format, || ()).unwrap(),
            enters,
            opener,
            behind,
        )
    }

    /// Limit (operations): Log lines queued for a slow destination | 4,096, then lines are dropped and counted
    #[test]
    fn writer_never_waits_for_a_stuck_destination_and_logs_the_loss() {
        let (mut queue, enters, opener, behind) = gated(LogFormat::Text);
        queue.write_all(b"1\n").unwrap();
        enters.recv().unwrap();
        for line in ["2\n", "3\n", "4\n", "5\n"] {
            queue.write_all(line.as_bytes()).unwrap();
        }
        drop(opener);
        queue.flush();
        let text = behind.text();
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| !line.contains("lines=2"))
            .collect();
        assert_eq!(lines, ["1", "2", "3"], "{text}");
        assert_eq!(text.matches("log lines were dropped").count(), 1, "{text}");
    }

    #[test]
    fn flush_waits_for_every_line_queued_before_it() {
        let captured = Captured::default();
        let mut queue = Queue::start(captured.clone(), LINES_MAX, LogFormat::Text, || ()).unwrap();
        (0..1_000).for_each(|line| writeln!(queue, "{line}").unwrap());
        queue.flush();
        assert!(captured.text().ends_with("\n999\n"));
    }

    #[test]
    fn loss_notice_is_json_in_a_json_log() {
        let notice: serde_json::Value =
            serde_json::from_str(&loss_notice(7, LogFormat::Json)).unwrap();
        assert_eq!(
            (&notice["lines"], &notice["level"]),
            (&7.into(), &"WARN".into())
        );
    }

    /// Limit (operations): Length of a log line | 8 KiB, then cut; JSON stays valid
    #[test]
    fn a_line_longer_than_eight_kibibytes_is_cut() {
        let longest = vec![b'x'; LINE_BYTES_MAX];
        for format in [LogFormat::Text, LogFormat::Json] {
            assert_eq!(bounded_line(&longest, format), longest);
        }
        let long = format!("{{\"text\":\"{}\\\"\"}}\n", "\u{e4}\\\"".repeat(10_000));
        let text = String::from_utf8(bounded_line(long.as_bytes(), LogFormat::Text)).unwrap();
        assert!(
            text.len() <= LINE_BYTES_MAX && text.ends_with("\"\n"),
            "{text}"
        );
        let bytes = format!(" bytes={} beginning=\"", long.len());
        assert!(text.contains(&bytes), "{text}");
        let json = bounded_line(long.as_bytes(), LogFormat::Json);
        assert!(json.len() <= LINE_BYTES_MAX, "{}", json.len());
        let line: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let beginning = line["beginning"].as_str().unwrap();
        assert!(
            long.starts_with(beginning) && beginning.len() > 1000,
            "{line}"
        );
        assert_eq!(line["bytes"], long.len());
    }

    #[test]
    fn file_is_appended_to_and_emptied_at_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adit.log");
        std::fs::write(&path, "old 7890\n").unwrap();
        let mut sink = open(&to_file(&path, Some(20))).unwrap();
        sink.write_all(b"first 890\n").unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "old 7890\nfirst 890\n"
        );
        sink.write_all(b"second 90\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "second 90\n");
    }

    #[test]
    fn file_without_a_limit_is_not_truncated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adit.log");
        let mut sink = open(&to_file(&path, None)).unwrap();
        (0..100).for_each(|_| sink.write_all(b"line\n").unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 500);
    }

    #[test]
    fn file_in_a_missing_folder_is_an_error_that_names_it() {
        let path = Path::new("/nonexistent/adit.log");
        let error = open(&to_file(path, Some(1))).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("log file /nonexistent/adit.log: "),
            "{error}"
        );
    }
}
