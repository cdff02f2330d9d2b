//! `adit status --fleet` and `kubectl adit status`: does every server reach every agent? Merges the answers of many processes.

mod answer;
mod kubectl;
mod merge;
mod model;
mod peers;
mod print;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use adit_config::KubectlOptions;

use self::answer::Answer;
use self::merge::merge;
use self::model::{Fleet, Remark, Verdict};
use super::client::ANSWER_BYTES_MAX;
use super::text::{has_colours, show};

/// Exit code if a link is missing.
const MISSING: u8 = 1;
/// Exit code if it is not known whether all links are there, and if the command fails.
pub const UNKNOWN: u8 = 2;

/// Merges the answers in files, and prints the result.
///
/// # Errors
/// Standard output is closed.
pub fn of_files(files: &[PathBuf], json: bool) -> anyhow::Result<ExitCode> {
    let (mut answers, mut problems) = (Vec::new(), Vec::new());
    for file in files {
        let (name, text) = read(file);
        match text {
            Ok(text) => sort(
                answer::parse(&name, &text, answer::ANSWERS_MAX),
                &mut answers,
                &mut problems,
            ),
            Err(error) => problems.push(Remark::new(name, format!("cannot be read: {error}"))),
        }
    }
    finish(&merge(answers, problems), json)
}

/// Asks the pods of a cluster, and prints the result.
///
/// # Errors
/// kubectl cannot list pods, there are none, or standard output is closed.
pub fn of_pods(options: &KubectlOptions) -> anyhow::Result<ExitCode> {
    let (mut answers, mut problems) = (Vec::new(), Vec::new());
    sort(kubectl::ask(options)?, &mut answers, &mut problems);
    finish(&merge(answers, problems), options.json)
}

/// Separates answers from what is none.
fn sort(
    results: Vec<Result<Answer, Remark>>,
    answers: &mut Vec<Answer>,
    problems: &mut Vec<Remark>,
) {
    for result in results {
        match result {
            Ok(answer) => answers.push(answer),
            Err(problem) => problems.push(problem),
        }
    }
}

/// The name of a file in messages, and its text. `-` is standard input.
fn read(file: &Path) -> (String, io::Result<String>) {
    if file == Path::new("-") {
        return ("standard input".to_owned(), bounded(io::stdin().lock()));
    }
    let text = File::open(file).and_then(bounded);
    (file.display().to_string(), text)
}

fn bounded(source: impl Read) -> io::Result<String> {
    let mut text = String::new();
    source
        .take(ANSWER_BYTES_MAX + 1)
        .read_to_string(&mut text)?;
    match text.len() as u64 > ANSWER_BYTES_MAX {
        true => Err(io::Error::other(format!(
            "it is larger than {} MiB",
            ANSWER_BYTES_MAX >> 20
        ))),
        false => Ok(text),
    }
}

/// JSON in printable ASCII: what pods say of themselves must not drive a terminal.
fn json_text(fleet: &Fleet) -> serde_json::Result<String> {
    let text = serde_json::to_string(fleet)?;
    let mut out = String::with_capacity(text.len() + 1);
    let mut units = [0; 2];
    for c in text.chars() {
        if c == ' ' || c.is_ascii_graphic() {
            out.push(c);
        } else {
            // Outside of strings compact JSON has no such character.
            let escaped = c.encode_utf16(&mut units).iter();
            out.extend(escaped.map(|unit| format!("\\u{unit:04x}")));
        }
    }
    out.push('\n');
    Ok(out)
}

fn finish(fleet: &Fleet, json: bool) -> anyhow::Result<ExitCode> {
    let text = match json {
        true => json_text(fleet)?,
        false => print::table(fleet, has_colours()),
    };
    show(&text)?;
    Ok(match fleet.verdict {
        Verdict::Linked => ExitCode::SUCCESS,
        Verdict::Missing => ExitCode::from(MISSING),
        Verdict::Unknown => ExitCode::from(UNKNOWN),
    })
}
