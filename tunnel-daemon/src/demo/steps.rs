//! Runs acts and checks, and remembers which were right.

use std::time::Duration;

use super::screen::{BAD, GOOD, HEADING, Screen};

/// Time limit of one step: an idle machine needs far less than a second, an emulated one half a minute.
const STEP_PATIENCE: Duration = Duration::from_secs(60);

/// Runs steps and reports them on the screen.
pub(super) struct Steps<'a> {
    screen: &'a Screen,
    /// Checks that are right are reported, too.
    shows_all: bool,
    /// Number of steps that succeeded.
    pub(super) right: usize,
    /// Failed steps, each with what was wrong.
    pub(super) wrong: Vec<String>,
}

impl<'a> Steps<'a> {
    pub(super) fn new(screen: &'a Screen, shows_all: bool) -> Self {
        Self {
            screen,
            shows_all,
            right: 0,
            wrong: Vec::new(),
        }
    }

    /// A part of the story: its title, and below it the result.
    pub(super) async fn act(
        &mut self,
        title: &str,
        work: impl Future<Output = anyhow::Result<String>>,
    ) {
        self.screen.line(self.screen.paint(HEADING, title));
        self.screen.working("   ...");
        if let Some(text) = self.run(title, work).await {
            self.screen.line(format_args!("   {text}"));
        }
    }

    /// The heading of some checks.
    pub(super) fn heading(&self, name: &str, place: &str) {
        if self.shows_all {
            let name = self.screen.paint(HEADING, name);
            self.screen.line(format!("{name} {place}").trim_end());
        }
    }

    /// A check.
    pub(super) async fn step(
        &mut self,
        name: &str,
        work: impl Future<Output = anyhow::Result<String>>,
    ) {
        self.screen.working(name);
        let detail = self.run(name, work).await;
        if let Some(detail) = detail.filter(|_| self.shows_all) {
            let mark = self.screen.paint(GOOD, "ok   ");
            self.screen.line(format_args!("  {mark} {name}: {detail}"));
        }
    }

    async fn run(
        &mut self,
        name: &str,
        work: impl Future<Output = anyhow::Result<String>>,
    ) -> Option<String> {
        let wrong = match tokio::time::timeout(STEP_PATIENCE, work).await {
            Ok(Ok(detail)) => {
                self.right += 1;
                return Some(detail);
            }
            Ok(Err(error)) => format!("{name}: {error:#}"),
            Err(_elapsed) => format!("{name}: not done after {STEP_PATIENCE:?}"),
        };
        let mark = self.screen.paint(BAD, "WRONG");
        self.screen.line(format_args!("  {mark} {wrong}"));
        self.wrong.push(wrong);
        None
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[tokio::test]
    async fn verdict_names_the_failed_step() {
        let screen = Screen::new(true);
        let mut steps = Steps::new(&screen, true);
        steps.step("good", async { Ok("fine".to_owned()) }).await;
        steps.step("bad", async { bail!("byte 7 is wrong") }).await;
        assert_eq!(steps.right, 1);
        assert_eq!(steps.wrong, ["bad: byte 7 is wrong"]);
    }

    #[tokio::test(start_paused = true)]
    async fn step_that_never_ends_fails() {
        let screen = Screen::new(true);
        let mut steps = Steps::new(&screen, true);
        steps.step("stuck", std::future::pending()).await;
        assert_eq!(steps.wrong, ["stuck: not done after 60s"]);
    }
}
