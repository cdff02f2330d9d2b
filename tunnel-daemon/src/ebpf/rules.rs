//! Redirect rules that follow a file.
//!
//! A file is read and checked as a whole before any rule applies. If it is broken, the active rules stay and an error is
//! logged.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use adit_host::files::{ReadError, Reader, STUCK_AFTER};
use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::redirect_view::RedirectView;
use adit_config::ConfigError;
use adit_config::limits;
use adit_config::plan::{Program, RuleFile};
use adit_tls::reload::{Changes, POLL_PERIOD};
use adit_tls::reread::Reread;

/// Number of active rules, and the generation of the rule set.
type InForce = (usize, u64);

/// Activates the rules of a file.
pub(crate) type Apply = Arc<dyn Fn(RuleFile) -> anyhow::Result<InForce> + Send + Sync>;

/// Result of reading the file. `None`: unchanged.
type Looked = Option<Result<InForce, String>>;

/// A rule file and its text when last read.
#[derive(Clone)]
pub(crate) struct Followed {
    path: PathBuf,
    of: Program,
    /// `None` after an error: any text then counts as new.
    text: Option<String>,
}

impl Followed {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// The file cannot be read or parsed; a start should fail with this error.
    pub(crate) fn load(path: &Path, of: Program) -> anyhow::Result<(Self, RuleFile)> {
        let named = || format!("--redirect-file {}", path.display());
        let text = read(path).with_context(named)?;
        let file = RuleFile::parse(&text, of)
            .map_err(anyhow::Error::msg)
            .with_context(named)?;
        let path = path.to_owned();
        let text = Some(text);
        Ok((Self { path, of, text }, file))
    }

    /// A plan together with the rules of its file, if it has one.
    ///
    /// # Errors
    /// The rule file is invalid; the error has its name and line.
    pub(crate) fn merge<P: Clone>(
        plan: &P,
        path: Option<&Path>,
        of: Program,
        with: impl FnOnce(&P, RuleFile) -> Result<P, ConfigError>,
    ) -> anyhow::Result<(P, Option<Self>)> {
        let Some(path) = path else {
            return Ok((plan.clone(), None));
        };
        let (followed, file) = Self::load(path, of)?;
        let all =
            with(plan, file).with_context(|| format!("--redirect-file {}", path.display()))?;
        Ok((all, Some(followed)))
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
        let mut reader = Reader::of(&[&self.path]);
        let mut last_error = None;
        let mut was_stuck = false;
        let following = async {
            loop {
                // Read at once: a change between loading and watching would go unnoticed otherwise.
                let (read, apply) = (self.clone(), Arc::clone(&apply));
                match reader.read(STUCK_AFTER, move || read.look(&*apply)).await {
                    Ok((text, outcome)) => {
                        self.told(outcome, &view, &mut last_error);
                        self.text = text;
                        if std::mem::take(&mut was_stuck) {
                            // Activates the rules anew, so that the status says so.
                            self.text = None;
                            continue;
                        }
                    }
                    Err(error @ ReadError::Pending { is_stuck_now }) => {
                        if is_stuck_now {
                            was_stuck = true;
                            view.reloaded(Err(&error.to_string()));
                        }
                        continue;
                    }
                    Err(error @ ReadError::Lost) => {
                        let file = self.path.display();
                        tracing::warn!(%error, %file, "cannot look at the rules of the redirect; the old ones stay in force");
                    }
                }
                changes.next(POLL_PERIOD).await;
            }
        };
        let _stopped: Option<()> = stop.run_until_cancelled(following).await;
    }

    /// Reads the file, and activates its rules if the text is new.
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
            // Log an error once, not with each poll of a missing file.
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
    // One byte more than the limit, so that the parser sees an oversized file.
    let most = limits::REDIRECT_FILE_BYTES_MAX as u64 + 1;
    adit_host::files::open(path)?
        .take(most)
        .read_to_string(&mut text)?;
    Ok(text)
}
