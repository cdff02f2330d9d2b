//! Tests of the log's set-up, and what other tests read logs with.

use std::io::Write;
use std::sync::{Arc, Mutex};

use super::*;

/// Collects what a subscriber writes.
#[derive(Clone, Default)]
pub(crate) struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Captured {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn to_file(path: &Path, bytes_max: Option<u64>) -> LogDestination {
    LogDestination::File {
        path: path.to_owned(),
        bytes_max,
        also_stderr: None,
    }
}

/// Runs `work` under a subscriber made from `options` and returns what it wrote.
pub(crate) fn logged(options: &LogOptions, work: impl FnOnce()) -> String {
    let captured = Captured::default();
    let writer = captured.clone();
    let (subscriber, _apply) = subscriber(options, move || writer.clone(), false).unwrap();
    tracing::subscriber::with_default(subscriber, work);
    captured.text()
}

#[test]
fn json_event_is_one_object_with_its_fields_on_top() {
    let options = LogOptions {
        format: LogFormat::Json,
        ..LogOptions::default()
    };
    let text = logged(
        &options,
        || tracing::info!(target: "adit::x", answer = 42, "hello \"you\"\nthere"),
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    let event: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(event["message"], "hello \"you\"\nthere");
    assert_eq!(event["answer"], 42);
    assert_eq!(event["level"], "INFO");
    assert_eq!(event["target"], "adit::x");
    assert!(event["timestamp"].is_string());
}

#[test]
fn library_events_are_hidden_at_debug() {
    let options = LogOptions {
        level: LevelFilter::DEBUG,
        ..LogOptions::default()
    };
    let text = logged(&options, || {
        tracing::debug!(target: "h2::codec", "frame");
        tracing::debug!(target: "adit_core::session", "ours");
    });
    assert!(text.contains("ours") && !text.contains("frame"), "{text}");
}

#[test]
fn only_named_libraries_are_logged() {
    for level in [LevelFilter::INFO, LevelFilter::DEBUG, LevelFilter::TRACE] {
        let libraries = "h2=debug".to_owned();
        let options = LogOptions {
            level,
            libraries,
            ..LogOptions::default()
        };
        let text = logged(&options, || {
            tracing::debug!(target: "h2::codec", "frame");
            tracing::info!(target: "hyper", "chatter");
            tracing::info!(target: "adit_core::session", "ours");
        });
        let heard = ["frame", "chatter", "ours"].map(|word| text.contains(word));
        assert_eq!(heard, [true, false, true], "{level}: {text}");
    }
}

#[test]
fn fatal_error_is_one_line_in_the_format_of_the_log() {
    let why = "agent port: cannot listen on\n127.0.0.1:1";
    let text = fatal(LogFormat::Text, why);
    assert_eq!(text, "error: agent port: cannot listen on 127.0.0.1:1\n");
    let json = fatal(LogFormat::Json, why);
    assert_eq!(json.matches('\n').count(), 1, "{json}");
    let line: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&line["level"], &line["message"]),
        (&"ERROR".into(), &why.into())
    );
    assert!(line["timestamp"].is_string(), "{json}");
}

#[test]
fn filter_wins_over_the_level() {
    let filter = Some(" h2=debug ".to_owned());
    let options = LogOptions {
        filter,
        ..LogOptions::default()
    };
    let text = logged(&options, || {
        tracing::debug!(target: "h2::codec", "frame");
        tracing::error!(target: "adit", "ours");
    });
    assert!(text.contains("frame") && !text.contains("ours"), "{text}");
}

#[test]
fn bad_filter_is_named_with_its_remedy() {
    let options = LogOptions {
        filter: Some("adit=loud".to_owned()),
        ..LogOptions::default()
    };
    let error = subscriber(&options, io::sink, false)
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("ADIT_LOG: \"adit=loud\" ") && error.contains("info,adit_tunnel=debug"),
        "{error}"
    );
}

#[test]
fn log_errors_are_found_without_starting_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adit.log");
    let to = |path: &Path| LogOptions {
        destination: to_file(path, Some(1)),
        ..LogOptions::default()
    };
    check(&LogOptions::default()).unwrap();
    check(&to(&path)).unwrap();
    assert!(!path.exists(), "no file is made");
    std::fs::write(&path, "").unwrap();
    check(&to(&path)).unwrap();
    for path in [folder.path().join("missing/adit.log"), folder.path().into()] {
        let error = check(&to(&path)).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("log file {}", path.display())),
            "{error}"
        );
    }
    let loud = LogOptions {
        filter: Some("adit=loud".to_owned()),
        ..LogOptions::default()
    };
    assert!(matches!(check(&loud), Err(LogError::BadFilter { .. })));
}
