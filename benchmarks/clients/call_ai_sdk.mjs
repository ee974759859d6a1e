// The AI SDK: by way of chats (@ai-sdk/openai-compatible), and of OpenAI's chats and responses (@ai-sdk/openai).
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import * as ai from 'ai'
import {
  ADDRESS, ASK, DESCRIPTIONS, FUNCTIONS, GetWeather, HELLO, KEY, MODEL, PLAN, RESULT, TOKENS, Trip, expect, run, text,
  validated,
} from './calls.mjs'

const { APICallError, Output, generateText, streamText, tool } = ai
const isStepCount = ai.isStepCount ?? ai.stepCountIs // its name before version 7
const ONE = { local: { parallel_tool_calls: false }, openai: { parallelToolCalls: false } }
globalThis.AI_SDK_LOG_WARNINGS = false
const baseURL = `${ADDRESS}/v1`
const openai = createOpenAI({ baseURL, apiKey: KEY })
const compatible = createOpenAICompatible({
  name: 'local', baseURL, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
})
const MODELS = { compatible: compatible(MODEL), chat: openai.chat(MODEL), response: openai.responses(MODEL) }

const tools = (strict) => Object.fromEntries(Object.entries(FUNCTIONS).map(([name, inputSchema]) =>
  [name, tool({ description: DESCRIPTIONS[name], inputSchema, ...(strict === undefined ? {} : { strict }) })]))
const weather = tool({
  description: DESCRIPTIONS.get_weather, inputSchema: GetWeather, execute: ({ city }) => `${city}: ${RESULT}`,
})

/** An answer that must be calls. */
function called(found) {
  expect(found.toolCalls.length, `no call but ${found.text} (${found.finishReason})`)
  for (const one of found.toolCalls) {
    expect(!one.invalid, one)
    validated(one.toolName, one.input)
  }
  expect(found.finishReason === 'tool-calls', found.finishReason)
  return 'call'
}

const calledOrSaid = (found) => (found.toolCalls.length ? called(found) : text(found.text))

/** A stream as one answer; errors in it are raised. */
async function streamed(given) {
  let failure
  const result = streamText({ ...given, onError: ({ error }) => { failure = error } })
  let said = ''
  let inputs = 0
  for await (const part of result.fullStream) {
    if (part.type === 'text-delta') said += part.text
    if (part.type === 'tool-input-delta') inputs += 1
  }
  if (failure) throw failure
  const usage = await result.usage
  expect(usage.outputTokens > 0, { usage })
  return { text: said, inputs, toolCalls: await result.toolCalls, finishReason: await result.finishReason, result }
}

function calls(model) {
  const given = { model, temperature: 0, maxOutputTokens: TOKENS, maxRetries: 0 }
  const required = { toolChoice: 'required', providerOptions: ONE }
  const output = Output.object({ schema: Trip })
  return {
    'generateText': async () => text((await generateText({ ...given, prompt: HELLO })).text),
    'streamText, with usage': async () => text((await streamed({ ...given, prompt: HELLO })).text),
    'tools, auto': async () => calledOrSaid(await generateText({ ...given, prompt: ASK, tools: tools() })),
    'tools, strict, auto': async () => calledOrSaid(await generateText({ ...given, prompt: ASK, tools: tools(true) })),
    'tools, required': async () =>
      called(await generateText({ ...given, ...required, prompt: ASK, tools: tools() })),
    'tools, named': async () => {
      const toolChoice = { type: 'tool', toolName: 'get_weather' }
      const found = await generateText({ ...given, prompt: ASK, tools: tools(), toolChoice })
      expect(found.toolCalls.every((one) => one.toolName === 'get_weather'), found.toolCalls)
      expect(found.toolCalls.length, found.text)
      for (const one of found.toolCalls) validated(one.toolName, one.input)
      return 'call'
    },
    'tools, streamed, auto': async () => calledOrSaid(await streamed({ ...given, prompt: ASK, tools: tools() })),
    'tools, streamed, required': async () => {
      const found = await streamed({ ...given, ...required, prompt: ASK, tools: tools() })
      expect(found.inputs > 0, 'no part of an input came')
      return called(found)
    },
    'tool loop': async () => {
      const found = await generateText({
        ...given, prompt: ASK, tools: { get_weather: weather }, providerOptions: ONE, stopWhen: isStepCount(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
      })
      expect(found.steps.length === 2 && found.steps[0].toolResults.length, found.steps.map((one) => one.content))
      text(found.text)
      return 'call'
    },
    'structured output (Output.object)': async () => {
      Trip.parse((await generateText({ ...given, prompt: PLAN, output })).output)
      return 'parsed'
    },
    'structured output, streamed': async () => {
      const { result } = await streamed({ ...given, prompt: PLAN, output })
      Trip.parse(await result.output)
      return 'parsed'
    },
    'tools with structured output': async () => {
      const found = await generateText({ ...given, prompt: ASK, tools: tools(), output, providerOptions: ONE })
      if (found.toolCalls.length) return called(found)
      Trip.parse(found.output)
      return 'parsed'
    },
  }
}

async function wrong() {
  try {
    const providerOptions = { local: { colour: 1 } }
    await generateText({ model: MODELS.compatible, prompt: HELLO, maxRetries: 0, providerOptions })
  } catch (error) {
    expect(APICallError.isInstance(error) && error.statusCode === 400 && /colour/.test(error.message), `${error}`)
    return 'error'
  }
  throw new Error('colour was accepted')
}

const all = Object.entries(MODELS).flatMap(([kind, model]) =>
  Object.entries(calls(model)).map(([name, call]) => [`${kind}, ${name}`, call]))
await run({ ...Object.fromEntries(all), 'compatible, error names the field': wrong })
