// The AI SDK's openai provider (/v1/responses) against a server: prints one JSON object. Arguments: base URL, model.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [baseURL, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const settings = { model: openai(name), temperature: 0, maxOutputTokens: 20, maxRetries: 0 };
const messages = [{ role: "user", content: "I am Bob." }];
const report = {};

const first = await generateText({ ...settings, messages });
messages.push(...first.response.messages, { role: "user", content: "Who am I?" });
const second = await generateText({ ...settings, messages });
report.second = second.text;
report.sent = second.request.body.input.map((item) => item.type ?? item.role);
report.streamed = await streamText({ ...settings, messages }).text;

report.errors = [];
for (const model of [openai(name), openai.chat(name)]) {
  try {
    await generateText({ ...settings, model, prompt: "word ".repeat(9000) });
  } catch (error) {
    report.errors.push([error.name, error.statusCode, error.data.error.code]);
  }
}
console.log(JSON.stringify(report));
