// The npm openai package against a server: prints one JSON object. Arguments: base URL, model.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const report = {};

const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
report.answer = answer.choices[0].message.content;

report.streamed = "";
report.numChunks = 0;
const stream = await client.chat.completions.create({
  model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  report.streamed += chunk.choices[0]?.delta?.content ?? "";
  report.numChunks += 1;
  report.usage = chunk.usage ?? report.usage;
}

const runner = client.chat.completions.stream({ model, messages, temperature: 0 });
report.helper = await runner.finalContent();
report.finishReason = (await runner.finalChatCompletion()).choices[0].finish_reason;

const aborted = await client.chat.completions.create({ model, messages, stream: true, ignore_eos: true });
for await (const _ of aborted) {
  aborted.controller.abort();
}

try {
  await client.chat.completions.create({ model: "gpt-4", messages });
} catch (error) {
  report.error = { name: error.constructor.name, status: error.status, message: error.message, param: error.param };
}
report.models = (await client.models.list()).data.map((card) => card.id);
console.log(JSON.stringify(report));
