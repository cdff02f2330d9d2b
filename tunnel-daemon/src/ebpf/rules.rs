//! Rules of a redirect that follow a file.
//!
//! A file is read and checked whole before any of it counts. One that is broken leaves the rules as they are, loudly.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::redirect_view::RedirectView;
use adit_config::limits;
use adit_config::plan::{RuleFile, RuleFileOf};
use adit_tls::blocking;
use adit_tls::reload::{Changes, POLL_PERIOD};
use adit_tls::reread::Reread;

/// How many rules are in force, and the how many-th set they are.
type InForce = (usize, u64);

/// Puts the rules of a file in force.
pub(crate) type Apply = Arc<dyn Fn(RuleFile) -> anyhow::Result<InForce> + Send + Sync>;

/// What came of a look at the file. `None`: it holds what it held.
type Looked = Option<Result<InForce, String>>;

/// A file of rules and what it held when it was read last.
#[derive(Clone)]
pub(crate) struct Followed {
    path: PathBuf,
    of: RuleFileOf,
    /// `None` after an error: whatever it holds then is new.
    text: Option<String>,
}

impl Followed {
    /// Reads it for the first time.
    ///
    /// # Errors
    /// It cannot be read, or a line of it; a start should fail on it.
    pub(crate) fn load(path: &Path, of: RuleFileOf) -> anyhow::Result<(Self, RuleFile)> {
        let named = || format!("--redirect-file {}", path.display());
        let text = read(path).with_context(named)?;
        let file = RuleFile::parse(&text, of)
            .map_err(anyhow::Error::msg)
            .with_context(named)?;
        let path = path.to_owned();
        let text = Some(text);
        Ok((Self { path, of, text }, file))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Follows the file until `stop`.
    pub(crate) async fn follow(
        mut self,
        apply: Apply,
        view: Arc<RedirectView>,
        reread: Reread,
        stop: CancellationToken,
    ) {
        let mut changes = Changes::of(&[&self.path], &reread);
        let mut last_error = None;
        loop {
            // First at once: a change between loading and watching would go unnoticed otherwise.
            let (read, apply) = (self.clone(), Arc::clone(&apply));
            match blocking::run(move || read.look(&*apply)).await {
                Ok((text, outcome)) => {
                    self.told(outcome, &view, &mut last_error);
                    self.text = text;
                }
                Err(error) => {
                    let file = self.path.display();
                    tracing::warn!(%error, %file, "cannot look at the rules of the redirect; the old ones stay in force");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = changes.next(POLL_PERIOD) => (),
            }
        }
    }

    /// Reads, and puts what is new in force.
    fn look(self, apply: &dyn Fn(RuleFile) -> anyhow::Result<InForce>) -> (Option<String>, Looked) {
        match read(&self.path) {
            Ok(text) if self.text.as_ref() == Some(&text) => (self.text, None),
            Ok(text) => {
                let file = RuleFile::parse(&text, self.of).map_err(anyhow::Error::msg);
                let outcome = file.and_then(apply);
                let text = outcome.is_ok().then_some(text);
                (text, Some(outcome.map_err(|error| format!("{error:#}"))))
            }
            Err(error) => (None, Some(Err(error.to_string()))),
        }
    }

    fn told(&self, outcome: Looked, view: &RedirectView, last_error: &mut Option<String>) {
        let file = self.path.display();
        match outcome {
            None => (),
            Some(Ok((rules, set))) => {
                *last_error = None;
                view.reloaded(Ok((rules, set)));
                tracing::info!(%file, rules, set, "new rules of the redirect are in force");
            }
            // Once, not with each look at a file that is gone.
            Some(Err(error)) if last_error.as_ref() == Some(&error) => (),
            Some(Err(error)) => {
                view.reloaded(Err(&error));
                tracing::error!(%file, error, "new rules of the redirect are broken; the old ones stay in force");
                *last_error = Some(error);
            }
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // One byte more than may be, so that who parses it sees that.
    let most = limits::REDIRECT_FILE_BYTES_MAX as u64 + 1;
    File::open(path)?.take(most).read_to_string(&mut text)?;
    Ok(text)
}
