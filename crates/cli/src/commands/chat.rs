//! `hallmark chat`.

use std::{
    cell::RefCell,
    io::{BufRead, IsTerminal, Write, stdin},
};

use engine::{Loaded, Prompt, Session};
use reedline::{DefaultPrompt, DefaultPromptSegment, Reedline, Signal};
use text::{Content, ConversationMessage, Effort, Input, Request, Think};

use crate::{
    args::Chat,
    failure::Failure,
    interrupt::Interrupt,
    render::{self, Printer},
};

const HELP: &str = "\
/help            this list
/clear           start anew; the system message stays
/system TEXT     set the system message and start anew
/think LEVEL     off, low, high, xhigh, max or 1 to 100
/stats           tokens so far
/quit            leave (Ctrl-D too)
Ctrl-C stops an answer; what came so far stays in the conversation.";

/// The conversation and what answers it.
struct Talk<'a> {
    args: &'a Chat,
    loaded: Loaded,
    session: Box<dyn Session>,
    interrupt: Interrupt,
    think: Think,
    messages: Vec<ConversationMessage>,
}

/// What a line asks for.
enum Next {
    Go,
    Quit,
}

pub fn run(args: &Chat) -> Result<(), Failure> {
    let (loaded, _) = args.admission.load(&args.model)?;
    let session = args.sessions.open(&loaded, args.sampling.context(&loaded))?;
    let mut talk = Talk {
        args,
        loaded,
        session,
        interrupt: Interrupt::install(),
        think: args.sampling.level().unwrap_or(Think::On(Effort::High)),
        messages: Vec::new(),
    };
    talk.clear(args.system.clone());
    if stdin().is_terminal() {
        eprintln!("/help lists the commands");
        return talk.interactive();
    }
    for line in stdin().lock().lines() {
        let line = line.map_err(|e| Failure::Io(format!("standard input: {e}")))?;
        if let Next::Quit = talk.line(&line)? {
            break;
        }
    }
    Ok(())
}

impl Talk<'_> {
    fn interactive(&mut self) -> Result<(), Failure> {
        let mut editor = Reedline::create();
        let prompt = DefaultPrompt::new(DefaultPromptSegment::Empty, DefaultPromptSegment::Empty);
        loop {
            match editor.read_line(&prompt) {
                Ok(Signal::Success(line)) => {
                    if let Next::Quit = self.line(&line)? {
                        return Ok(());
                    }
                }
                Ok(Signal::CtrlC) => eprintln!("/quit or Ctrl-D leaves"),
                Ok(_) => return Ok(()),
                Err(e) => return Err(Failure::Io(format!("the terminal: {e}"))),
            }
        }
    }

    fn line(&mut self, line: &str) -> Result<Next, Failure> {
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => {}
            "/quit" | "/exit" => return Ok(Next::Quit),
            "/help" => render::line(HELP)?,
            "/clear" => {
                let system = self.system();
                self.clear(system);
            }
            "/system" => self.clear((!rest.is_empty()).then(|| rest.trim().to_owned())),
            "/think" => match rest.trim().parse() {
                Ok(level) => self.think = level,
                Err(e) => eprintln!("{e}"),
            },
            "/stats" => render::line(&format!(
                "{} of {} tokens, {} messages",
                self.session.ids().len(),
                self.session.context(),
                self.messages.len()
            ))?,
            _ if command.starts_with('/') => eprintln!("unknown command {command}; /help lists them"),
            _ => self.turn(line)?,
        }
        let _ = std::io::stderr().flush();
        Ok(Next::Go)
    }

    fn system(&self) -> Option<String> {
        match self.messages.first() {
            Some(ConversationMessage::System { content, .. }) => Some(content.prompt.text().to_owned()),
            _ => None,
        }
    }

    fn clear(&mut self, system: Option<String>) {
        self.messages.clear();
        if let Some(text) = system {
            self.messages
                .push(ConversationMessage::System { content: Content::text(text), tools: Vec::new() });
        }
    }

    /// Answers one message. A turn that fails leaves the conversation as it was, with the reason.
    fn turn(&mut self, text: &str) -> Result<(), Failure> {
        self.messages.push(ConversationMessage::User { content: Content::text(text) });
        let mut request = Request::from_text("", self.think);
        if let Input::Conversation(conversation) = &mut request.input {
            conversation.messages = self.messages.clone();
        }
        let context = self.session.context();
        let limit = self.args.sampling.max_tokens;
        let mut prompt = match Prompt::from_request(&request, &self.loaded, context, limit) {
            Ok(prompt) => prompt,
            Err(e) => {
                self.messages.pop();
                eprintln!("{e}; /clear starts anew");
                return Ok(());
            }
        };
        self.args.sampling.apply(&mut prompt.sampling);
        self.interrupt.clear();
        let printer = RefCell::new(Printer::new());
        let answer = engine::answer(
            &self.loaded,
            &mut *self.session,
            &prompt,
            &mut |event| printer.borrow_mut().event(event),
            &|| self.interrupt.pressed() || printer.borrow().failed(),
        )?;
        self.interrupt.clear();
        printer.into_inner().finish(&answer.message)?;
        self.messages.push(ConversationMessage::Assistant {
            text: answer.message.content,
            reasoning: Some(answer.message.reasoning).filter(|r| !r.is_empty()),
            calls: Vec::new(),
            prefix: false,
        });
        Ok(())
    }
}
